"""The decoder on the CPU kernels against the float32 one in torch, on tiny models of every kind.

On every instruction set that this machine can run, not the best one alone.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.models import TINY, load, save_tiny
from kvasir.worker import loader
from kvasir.worker.contracts import Chunk, StepPlan
from kvasir.worker.kernels.library import Kernels, Unavailable, load_kernels
from kvasir.worker.kernels.targets import TARGETS, usable_targets
from kvasir.worker.loader import LoadedModel

PROMPT = tuple(range(20, 150))
BLOCKS = (7, 3, 9, 1, 14, 5, 12, 2, 11)


@pytest.fixture(autouse=True, params=[target.name for target in usable_targets()])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are loaded run on the kernels of one target."""
    target = next(target for target in TARGETS if target.name == request.param)
    found = load_kernels(target)
    if isinstance(found, Unavailable):
        pytest.skip(f"NO CPU KERNELS TO TEST: {found.reason}")
    monkeypatch.setattr(loader, "find_kernels", lambda: found)


def logprobs(loaded: LoadedModel, cuts: Sequence[int], beside: bool = False) -> torch.Tensor:
    """Of the whole vocabulary after each token of PROMPT, computed in chunks that end at ``cuts``.

    ``beside``: with another sequence in every step.
    """
    rows = []
    for start, end in zip((0, *cuts), (*cuts, len(PROMPT)), strict=True):
        following = PROMPT[end] if end < len(PROMPT) else 0
        chunk = Chunk(
            "a",
            PROMPT[start:end],
            start,
            BLOCKS,
            prompt_logprobs=loaded.vocab_size,
            next_token_id=following,
        )
        other = (Chunk("b", (5,), start, tuple(range(20, 30))),) if beside else ()
        result = loaded.runner.execute(StepPlan((chunk, *other)))
        for entry in result["a"].prompt_logprobs:
            ids, values = zip(*entry.top, strict=True)
            rows.append(
                torch.empty(loaded.vocab_size).scatter(0, torch.tensor(ids), torch.tensor(values))
            )
    return torch.stack(rows)


@pytest.mark.parametrize("kind", list(TINY))
def test_close_to_float32(tmp_path: Path, kind: str) -> None:
    """Biases, norms of heads, tied and untied layers, stretched rotations, odd sizes."""
    save_tiny(kind, tmp_path)
    exact = logprobs(load(f"file://{tmp_path}"), ()).double()
    rounded = logprobs(load(f"file://{tmp_path}", dtype="bfloat16", threads=2), ()).double()
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert divergence.mean() < 1e-3
    assert divergence.max() < 2e-2


@pytest.mark.parametrize(
    ("quantization", "activations"),
    [("none", "none"), ("int8", "none"), ("int8", "int8"), ("int4", "none")],
)
def test_no_bit_depends_on_chunks_batch_or_threads(
    tmp_path: Path, quantization: str, activations: str
) -> None:
    save_tiny("qwen3", tmp_path)

    def build(threads: int) -> LoadedModel:
        return load(
            f"file://{tmp_path}",
            dtype="bfloat16",
            threads=threads,
            quantization=quantization,
            activation_quantization=activations,
        )

    one, three = build(1), build(3)
    expected = logprobs(one, ())
    assert torch.equal(logprobs(three, ()), expected)
    assert torch.equal(logprobs(one, (1, 2, 50, 51), beside=True), expected)
    assert torch.equal(logprobs(three, (16, 100, 128), beside=True), expected)


@pytest.mark.parametrize("kind", list(TINY))
def test_coding_the_weights_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    save_tiny(kind, tmp_path)
    coded = load(f"file://{tmp_path}", dtype="bfloat16")
    monkeypatch.setattr(Kernels, "coded", lambda _, plain: plain)
    plain = load(f"file://{tmp_path}", dtype="bfloat16")
    assert coded.weight_bytes < 0.85 * plain.weight_bytes
    assert torch.equal(logprobs(coded, ()), logprobs(plain, ()))


def test_without_kernels_torch_computes_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(loader, "find_kernels", lambda: Unavailable("nothing to build them with"))
    with caplog.at_level(logging.WARNING):
        plain = load(f"file://{tmp_path}", dtype="bfloat16")
    assert [record.getMessage() for record in caplog.records] == [
        "no CPU kernels: nothing to build them with; torch computes instead, at a quarter of the "
        "speed or less"
    ]
    assert logprobs(plain, ()).isfinite().all()
