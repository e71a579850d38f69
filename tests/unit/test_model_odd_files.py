"""Files of a model that say odd things: it is opened, or refused by file, field and fix."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import opened, save_tiny
from kvasir.worker.model.source import ModelSource

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
DESCRIBED: dict[str, dict[str, Any]] = {
    TOKENIZER_CONFIG: {
        "bos_token": {"content": "w1"},
        "eos_token": "w2",
        "chat_template": [{"name": "default", "template": "D"}],
    },
    GENERATION_CONFIG: {"eos_token_id": [2, 3]},
}
CONFIG_KEYS = (
    *("model_type", "hidden_act", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    *("max_position_embeddings", "sliding_window", "use_sliding_window", "attention_bias"),
    *("mlp_bias", "tie_word_embeddings", "eos_token_id", "rope_scaling", "rope_parameters"),
)
ENDLESS = "[" * 100_000
"""Deeper than any reader follows."""
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 2**31, 10**30, 0.0, -0.5, 1e-300, 1e300]),
    st.integers(-4, 600),
    st.floats(),
)
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4), st.just("\ud800")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every file that is read is there."""
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama3-rope", path)
    for name, content in DESCRIBED.items():
        (path / name).write_text(json.dumps(content))
    return path


def opened_with(folder: Path, name: str, text: str) -> ModelSource | str:
    """What comes of the folder while one of its files has this text."""
    path = folder / name
    before = path.read_bytes()
    path.write_text(text)
    try:
        return opened(folder)
    finally:
        path.write_bytes(before)


def edited(folder: Path, name: str, place: tuple[str, ...], value: Any) -> str:
    """The JSON of a file with another value at ``place``."""
    raw = json.loads((folder / name).read_text())
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(raw)


ROPE = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
)
PLACES = [
    *((CONFIG, (key,)) for key in (*CONFIG_KEYS, "rope_theta", "partial_rotary_factor")),
    *((CONFIG, ("rope_parameters", key)) for key in ROPE),
    *((TOKENIZER_CONFIG, (key,)) for key in DESCRIBED[TOKENIZER_CONFIG]),
    (TOKENIZER_CONFIG, ("bos_token", "content")),
    (GENERATION_CONFIG, ("eos_token_id",)),
]


@given(place=st.sampled_from(PLACES), value=ODD)
def test_a_folder_is_opened_or_refused_whatever_a_field_says(
    folder: Path, place: tuple[str, tuple[str, ...]], value: Any
) -> None:
    name, keys = place
    opened_with(folder, name, edited(folder, name, keys, value))


@given(
    name=st.sampled_from([CONFIG, *DESCRIBED, "tokenizer.json"]),
    at=st.floats(0, 1),
    text=st.sampled_from(["", "{", "[", '"', "}", "null", "\x00", "1e999", ENDLESS]),
)
def test_a_folder_is_opened_or_refused_whatever_a_file_is_cut_by(
    folder: Path, name: str, at: float, text: str
) -> None:
    whole = (folder / name).read_text()
    opened_with(folder, name, whole[: int(at * len(whole))] + text)


@pytest.mark.parametrize("value", ["wide", [1e4], math.nan, -1.0, 0, True, {}, 1e300])
def test_a_number_that_is_none_is_named(folder: Path, value: Any) -> None:
    for place in (("rope_theta",), ("rope_parameters", "rope_theta"), ("rms_norm_eps",)):
        said = opened_with(folder, CONFIG, edited(folder, CONFIG, place, value))
        field = ".".join(place)
        assert isinstance(said, str)
        assert said.startswith(f"config.json: {field} ")
        assert f"; use a model with {field} that is a number" in said


@pytest.mark.parametrize("value", ["4", [4], math.nan, -4, 0, 4.5, True, {}, 2**31])
def test_a_size_that_is_none_is_named(folder: Path, value: Any) -> None:
    for key in ("vocab_size", "num_hidden_layers", "num_key_value_heads"):
        said = opened_with(folder, CONFIG, edited(folder, CONFIG, (key,), value))
        assert isinstance(said, str)
        assert said.startswith(f"config.json: {key} ")
        assert f"; use a model with {key} that is a whole number from 1 to" in said


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        (CONFIG, ("eos_token_id",), "2", "config.json: eos_token_id '2' is not supported"),
        (CONFIG, ("eos_token_id",), [2, None], "config.json: eos_token_id [2, None] is not"),
        (CONFIG, ("attention_bias",), "no", "config.json: attention_bias 'no' is not supported"),
        (CONFIG, ("rope_parameters",), [1], "config.json: rope_parameters [1] is not supported"),
        (CONFIG, ("num_hidden_layers",), 2**31 - 1, "model: 2147483647 layers are more than"),
        (
            CONFIG,
            ("rope_parameters", "high_freq_factor"),
            1.0,
            "config.json: rope_parameters.high_freq_factor 1.0 is not supported",
        ),
        (GENERATION_CONFIG, ("eos_token_id",), {}, "generation_config.json: eos_token_id {} is"),
        (TOKENIZER_CONFIG, ("bos_token",), 7, "tokenizer_config.json: bos_token 7 is not"),
        (
            TOKENIZER_CONFIG,
            ("bos_token", "content"),
            [],
            "tokenizer_config.json: bos_token.content [] is not supported",
        ),
        (TOKENIZER_CONFIG, ("eos_token",), "\ud800", "tokenizer_config.json: eos_token"),
        (TOKENIZER_CONFIG, ("chat_template",), 7, "tokenizer_config.json: chat_template 7 is not"),
    ],
)
def test_other_fields_of_another_type_are_named(
    folder: Path, name: str, place: tuple[str, ...], value: Any, said: str
) -> None:
    refusal = opened_with(folder, name, edited(folder, name, place, value))
    assert isinstance(refusal, str)
    assert refusal.startswith(said)
    assert "; use a model with " in refusal or "; check the model's config" in refusal


@pytest.mark.parametrize("name", [CONFIG, *DESCRIBED])
@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "not a JSON object"), ("", "not valid JSON"), (ENDLESS, "not valid JSON")],
)
def test_a_file_that_is_no_object_is_named(folder: Path, name: str, text: str, said: str) -> None:
    refusal = opened_with(folder, name, text)
    assert isinstance(refusal, str)
    assert refusal.startswith(f"{folder / name}: {said}")


@pytest.mark.parametrize(
    "name", [CONFIG, TOKENIZER_CONFIG, "tokenizer.json", "chat_template.jinja"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """The memory of a process has no byte at 0, so that reading it fails for everyone."""
    save_tiny("llama", tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")
    said = opened(tmp_path)
    assert said == (
        f"model: {tmp_path / name} cannot be read (Input/output error); "
        "make it readable, or remove it"
    )


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    said = opened(tmp_path)
    assert isinstance(said, str)
    assert said.startswith(f"{tmp_path / 'chat_template.jinja'}: not UTF-8 text")
