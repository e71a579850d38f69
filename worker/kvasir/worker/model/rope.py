"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864).

Partners are half a head apart, as in Hugging Face checkpoints: (x[i], x[i + d/2]) turns by
``position * frequency[i]``. All of it is float32.
"""

import math

import torch
from torch import Tensor

from kvasir.worker.model.config import Llama3Scaling, ModelConfig


def rotation_tables(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for ``rotate``, each [positions, 1, head_dim]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [N, heads, head_dim] by each row's cosines and signed sines [N, 1, head_dim]."""
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).addcmul_(partners, sin)


def frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair: [head_dim // 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    if config.rope_divisors is not None:
        plain = plain / torch.tensor(config.rope_divisors, dtype=torch.float32)
    if config.llama3_scaling is not None:
        plain = _stretch(plain, config.llama3_scaling)
    return plain


def _stretch(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow frequencies divided by ``factor``, fast ones kept, a smooth ramp between.

    Speed is counted in turns over the original context (Llama 3.1's reference code).
    """
    turns = scaling.original_context * plain / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain
