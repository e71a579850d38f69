"""`kvasir bench quality`: figures that can be worked out by hand."""

import math
from random import Random

import pytest
import torch

from kvasir.bench.quality import _Sums, draw_windows, final_number
from kvasir.bench.workload import WorkloadError


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("She has 3 + 4 = <<3+4=7>>7 left.\n#### 7", "7"),
        (" 1,200 in all.\n#### 1,200\n\nQuestion: Of 5 boats\nAnswer: 9\n#### 9", "1200"),
        ("That makes $12.50 for 3 days.\n#### $12.50", "12.5"),
        ("The debt is #### -40.00", "-40"),
        ("First 3, then 8 of them.", "8"),
        ("None at all.", None),
    ],
)
def test_final_number(answer: str, number: str | None) -> None:
    assert final_number(answer) == number


def test_windows_do_not_overlap_and_follow_the_seed() -> None:
    tokens = list(range(103))
    windows = draw_windows(tokens, 5, 20, Random("0/1"))
    assert sorted(token for window in windows for token in window) == list(range(100))
    assert windows == draw_windows(tokens, 5, 20, Random("0/1"))
    assert windows != draw_windows(tokens, 5, 20, Random("0/2"))
    with pytest.raises(WorkloadError, match="103 tokens, fewer than 6 windows of 20"):
        draw_windows(tokens, 6, 20, Random(0))


def test_sums() -> None:
    """Two rows of two tokens: chances 3/4, 1/4 for sure, and even ones for the form at hand."""
    exact = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log()
    even = torch.zeros(2, 2)
    sums = _Sums()
    sums.add(even, exact, torch.tensor([0, 1]))
    assert sums.tokens == 2
    assert sums.surprise == pytest.approx(2 * math.log(2))
    assert sums.divergence == pytest.approx(2 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    assert sums.agreeing == 1
    same = _Sums()
    same.add(exact, exact, torch.tensor([0, 1]))
    assert (same.divergence, same.agreeing) == (0.0, 2)
