"""Calibrated int4: what it keeps of one matrix, how its text is chosen, and what it takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir.bench.quality_command import _text as text_of_bench_quality
from kvasir.worker.calibration.gptq import round_matrix, settled
from kvasir.worker.calibration.text import standard_docstrings
from kvasir.worker.model.quantization import quantize_int4


def correlated(tokens: int, inputs: int, seed: int) -> Tensor:
    """Rows as layers see them: features depend on each other, and few of them are large."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=random) * 0.3 + torch.eye(inputs)
    sizes = torch.rand(inputs, generator=random) ** 3 + 0.05
    return torch.randn(tokens, inputs, generator=random) @ mixing * sizes


@settings(deadline=None, max_examples=40)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 130),
    scale=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]),
    offset=st.sampled_from([0.0, 0.5, 300.0]),
    seed=st.integers(0, 2**31),
)
def test_int4_keeps_what_was_rounded_bit_for_bit(
    outputs: int, inputs: int, scale: float, offset: float, seed: int
) -> None:
    """Also groups of tiny values, of almost equal ones, and of outliers among them."""
    torch.manual_seed(seed)
    weight = (torch.randn(outputs, inputs) ** 3 + offset) * scale
    rows = correlated(200, inputs, seed)
    found = round_matrix(weight, rows, torch.zeros(200, outputs))
    assert torch.equal(quantize_int4(found).dequantized(), found)
    assert torch.equal(settled(found), found)


def test_errors_are_made_up_for() -> None:
    """On rows that were not seen, products are closer than those of plain rounding."""
    torch.manual_seed(5)
    weight = torch.randn(64, 96)
    rows = correlated(3000, 96, 5)
    seen, unseen = rows[:2000], rows[2000:]
    found = round_matrix(weight, seen, torch.zeros(2000, 64))
    plain = quantize_int4(weight).dequantized()
    errors = [((unseen @ (w - weight).T).norm()) for w in (found, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_inputs_that_are_disturbed_are_made_up_for() -> None:
    """What is wanted are the products with the exact inputs; half of the way there is taken."""
    torch.manual_seed(6)
    weight = torch.randn(64, 96)
    exact = correlated(3000, 96, 6)
    disturbed = exact + 0.3 * exact.roll(1, 1)
    wanted = exact @ weight.T
    seen = slice(0, 2000)
    missing = (wanted - disturbed @ weight.T)[seen]
    found = round_matrix(weight, disturbed[seen], missing)
    without = round_matrix(weight, disturbed[seen], torch.zeros_like(missing))
    errors = [(disturbed[2000:] @ w.T - wanted[2000:]).norm() for w in (found, without)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("place", ["weight", "inputs"])
def test_what_int4_cannot_hold_is_an_error(value: float, place: str) -> None:
    """A value that is none, and one that is beyond a scale in float16 or a square in float32."""
    weight, rows = torch.ones(8, 64), correlated(100, 64, 7)
    (weight if place == "weight" else rows)[3, 5] = value
    with pytest.raises(ArithmeticError):
        round_matrix(weight, rows, torch.zeros(100, 8))


def test_standard_text_is_no_part_of_what_quality_is_measured_on() -> None:
    measured = text_of_bench_quality(None)
    docstrings = standard_docstrings().split("\n\n")
    assert sum(map(len, docstrings)) > 200_000
    paragraphs = [" ".join(part.split()) for part in docstrings if len(part) > 200]
    flat = " ".join(measured.split())
    assert not [part for part in paragraphs if part in flat]
