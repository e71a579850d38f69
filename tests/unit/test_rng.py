"""Philox against its published answers, and the numbers drawn from it."""

import numpy as np
import pytest
import torch

from helpers.plain_sampler import splitmix64
from kvasir.worker.sampling.rng import exponentials, philox4x32, stream_keys

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


def test_exponentials_follow_splitmix64() -> None:
    """The published outputs for state 1234567, and the plain generator for other states."""
    assert splitmix64(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    keys = torch.tensor([1234567, 0, -1, -(2**63)])
    found = exponentials(keys, 500)
    for key, row in zip(keys.tolist(), found, strict=True):
        uniform = np.array([(bits >> 11) + 0.5 for bits in splitmix64(key, 500)]) / 2**53
        np.testing.assert_allclose(row.numpy(), -np.log1p(-uniform), rtol=1e-5)


def test_rows_are_independent() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 1]
    indices = [0, 0, 5, 2**40, 1]
    together = stream_keys(seeds, indices)
    alone = [stream_keys([seed], [index])[0] for seed, index in zip(seeds, indices, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)
    keys = torch.from_numpy(together)
    rows = [exponentials(keys[i : i + 1], 100)[0] for i in range(len(keys))]
    assert torch.equal(exponentials(keys, 100), torch.stack(rows))


@pytest.mark.parametrize("axis", ["tokens", "indices", "seeds"])
def test_numbers_are_exponential(axis: str) -> None:
    """Chi-square over 64 cells, 99.99 % quantile of 63 degrees of freedom: about 112."""
    count = 64_000
    keys = {
        "tokens": stream_keys([7], [3]),
        "indices": stream_keys([7] * count, range(count)),
        "seeds": stream_keys(range(count), [3] * count),
    }[axis]
    numbers = exponentials(torch.from_numpy(keys), count if axis == "tokens" else 1).flatten()
    assert numbers.min() > 0.0
    assert numbers.isfinite().all()
    uniform = 1 - (-numbers.double()).exp().numpy()
    cells = np.bincount((uniform * 64).astype(int), minlength=64)
    expected = count / 64
    assert ((cells - expected) ** 2 / expected).sum() < 112
