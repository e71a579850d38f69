"""Philox against its published answers, and the numbers drawn from it."""

import numpy as np
import pytest

from kvasir.worker.sampling.rng import philox4x32, uniforms

# Known answers that Salmon et al. publish with their reference code (10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert tuple(philox4x32(np.array([counter]), np.array([key]))[0].tolist()) == answer


def test_rows_are_independent() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 1]
    indices = [0, 0, 5, 2**40, 1]
    together = uniforms(seeds, indices)
    alone = [uniforms([seed], [index])[0] for seed, index in zip(seeds, indices, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


def test_numbers_are_uniform_over_indices_and_over_seeds() -> None:
    """Chi-square over 64 cells, 99.99 % quantile of 63 degrees of freedom: about 112."""
    count = 64_000
    for numbers in (
        uniforms([7] * count, range(count)),
        uniforms(range(count), [3] * count),
    ):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        cells = np.bincount((numbers * 64).astype(int), minlength=64)
        expected = count / 64
        assert ((cells - expected) ** 2 / expected).sum() < 112
