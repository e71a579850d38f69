"""Counter-based random numbers: Philox4x32-10.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
The number for output token i of a request is a pure function of (seed, i). No state moves
with a request, so a replay, another worker, or another batch draws the same tokens.
"""

from collections.abc import Sequence

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox.

    Args:
        counters: [N, 4] and
        keys: [N, 2], each entry in [0, 2**32).

    Returns:
        uint32 [N, 4].
    """
    c0, c1, c2, c3 = counters.T.astype(np.uint64)
    k0, k1 = keys.T.astype(np.uint64)
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ k0,
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, output index), all 53 bits random: float64 [N]."""
    keys = _words(seeds)
    counters = np.concatenate((_words(indices), np.zeros_like(keys)), axis=-1)
    words = philox4x32(counters, keys).astype(np.uint64)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    bits = (high << np.uint64(26)) | low
    return bits.astype(np.float64) * 2.0**-53


def _words(values: Sequence[int]) -> np.ndarray:
    """64-bit integers as (low, high) words: [N, 2]."""
    whole = np.array(values, dtype=np.uint64)
    return np.stack((whole & _LOW, whole >> _SHIFT), axis=-1)
