"""Counter-based random numbers: Philox4x32-10, and SplitMix64 from the key that it gives.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
The numbers for output token i of a request are a pure function of (seed, i) and of the token
that may be drawn. No state moves with a request, so a replay, another worker, or another batch
draws with the same ones.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# SplitMix64's increment and multipliers, as the signed integers that torch has.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


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


def stream_keys(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """The key of each (seed, output index), from which ``exponentials`` draws: int64 [N]."""
    keys = _words(seeds)
    counters = np.concatenate((_words(indices), np.zeros_like(keys)), axis=-1)
    words = philox4x32(counters, keys).astype(np.uint64)
    return ((words[:, 0] << _SHIFT) | words[:, 1]).view(np.int64)


def exponentials(keys: Tensor, vocab: int) -> Tensor:
    """One exponential random number per key and token id: float32 [N, vocab], above 0.

    The number of a token is output number ``token id`` of SplitMix64 (Steele, Lea and Flood,
    OOPSLA 2014) with the key as its state, so it does not depend on any other token or row.

    Args:
        keys: int64 [N].
    """
    steps = torch.arange(1, vocab + 1, device=keys.device) * _GOLDEN
    # A CPU keeps one row's temporaries in its cache; a GPU wants few large operations.
    rows = 1 if keys.device.type == "cpu" else len(keys)
    return torch.cat([_exponentials(part[:, None] + steps) for part in torch.split(keys, rows)])


def _exponentials(bits: Tensor) -> Tensor:
    """SplitMix64's output for each state, as an exponential; ``bits`` is overwritten."""
    bits ^= (bits >> 30) & _ones(34)  # a logical shift: torch's keeps the sign
    bits *= _MIX[0]
    bits ^= (bits >> 27) & _ones(37)
    bits *= _MIX[1]
    bits ^= (bits >> 31) & _ones(33)
    # 53 random bits in (0, 1). Small numbers, which decide, keep all their precision in float32;
    # the greatest must not round to 1, whose exponential is infinite.
    uniform = (((bits >> 11) & _ones(53)).double() + 0.5).mul_(2.0**-53).float()
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _ones(count: int) -> int:
    return (1 << count) - 1


def _words(values: Sequence[int]) -> np.ndarray:
    """64-bit integers as (low, high) words: [N, 2]."""
    whole = np.array(values, dtype=np.uint64)
    return np.stack((whole & _LOW, whole >> _SHIFT), axis=-1)
