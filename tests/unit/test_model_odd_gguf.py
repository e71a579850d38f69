"""GGUF files that say odd things: each is opened, or refused by file, key and fix."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.gguf_files import write
from helpers.models import opened, save_tiny
from kvasir.worker.model.source import ModelSource

GGUF_KEYS = (
    *("general.architecture", "llama.context_length", "llama.embedding_length"),
    *("llama.block_count", "llama.feed_forward_length", "llama.attention.head_count"),
    *("llama.attention.head_count_kv", "llama.attention.layer_norm_rms_epsilon"),
    *("llama.attention.key_length", "llama.attention.sliding_window", "llama.expert_count"),
    *("llama.rope.freq_base", "llama.rope.dimension_count", "llama.rope.scaling.type"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"),
    *("tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.bos_token_id"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.chat_template"),
)
GGUF_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 2**31 - 1),
    st.floats(width=32),
    st.text(max_size=4),
    st.lists(st.integers(-4, 600), min_size=1, max_size=3),
    st.lists(st.floats(width=32), min_size=1, max_size=3),
    st.lists(st.text(max_size=3), min_size=1, max_size=3),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder that files are written from, and its config."""
    folder = tmp_path_factory.mktemp("model")
    return folder, save_tiny("llama", folder).config


def opened_with(
    tiny: tuple[Path, Any], changed: Mapping[str, Any], extra: Mapping[str, np.ndarray]
) -> ModelSource | str:
    """What comes of a file with ``changed`` metadata and ``extra`` tensors."""
    folder, config = tiny
    path = folder / "odd.gguf"
    write(path, folder, config, extra, changed)
    return opened(path)


@given(key=st.sampled_from(GGUF_KEYS), value=GGUF_VALUES)
def test_a_gguf_file_is_opened_or_refused_whatever_a_key_says(
    tiny: tuple[Path, Any], key: str, value: Any
) -> None:
    opened_with(tiny, {key: value}, {})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.rope.freq_base", "wide", "is a number from 1 to"),
        ("llama.rope.freq_base", math.nan, "is a number from 1 to"),
        ("llama.attention.head_count", [6, 6, 6], "is a whole number from 1 to"),
        ("llama.block_count", -3, "is a whole number from 1 to"),
        ("llama.attention.key_length", "8", "is a whole number from 0 to"),
        ("llama.rope.scaling.type", "linear", "none"),
        ("tokenizer.ggml.tokens", [1, 2], "that is a list of text"),
        ("tokenizer.ggml.merges", "a b", "that is a list of text"),
        ("tokenizer.ggml.eos_token_id", "2", "that is a whole number or a list of them"),
    ],
)
def test_gguf_metadata_of_another_type_is_named(
    tiny: tuple[Path, Any], key: str, value: Any, said: str
) -> None:
    refusal = opened_with(tiny, {key: value}, {})
    assert isinstance(refusal, str)
    assert refusal.startswith(f"odd.gguf: {key} ")
    assert said in refusal


@pytest.mark.parametrize("key", ["llama.block_count", "tokenizer.ggml.tokens"])
def test_a_missing_key_of_gguf_metadata_is_named(tiny: tuple[Path, Any], key: str) -> None:
    refusal = opened_with(tiny, {key: None}, {})
    assert refusal == f"odd.gguf: {key} is missing; use the model's complete files"


@pytest.mark.parametrize(
    ("divisors", "said"),
    [
        (np.ones(5, np.float32), "has shape [5], its config means [4]"),
        (np.array([1, 1, 0, 1], np.float32), "a rotary divisor is not above 0"),
        (np.array([1, 1, np.inf, 1], np.float32), "rope_freqs.weight holds values that are not"),
        (np.ones(4, np.int32), "unsupported type I32"),
    ],
)
def test_odd_rotary_divisors_are_refused(
    tiny: tuple[Path, Any], divisors: np.ndarray, said: str
) -> None:
    assert said in str(opened_with(tiny, {}, {"rope_freqs.weight": divisors}))


def test_no_rotary_divisors_suit_no_heads(tiny: tuple[Path, Any]) -> None:
    changed = {"llama.attention.key_length": 1}
    refusal = opened_with(tiny, changed, {"rope_freqs.weight": np.ones(0, np.float32)})
    assert isinstance(refusal, str)
