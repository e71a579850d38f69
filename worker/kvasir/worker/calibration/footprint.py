"""How much memory calibration takes, counted from shapes before anything is read. Pure.

As in model/footprint.py, what else the process holds is not counted.
"""

import math
from dataclasses import dataclass

import torch

from kvasir.worker.calibration.checkpoint import SHARD_BYTES
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.footprint import footprint
from kvasir.worker.model.quantization import Quantization

_ROUNDED = 60
"""Bytes per weight of a matrix while it is rounded: its own, and copies in float32 and float64."""
_CORRELATED = 32
"""Bytes per pair of its inputs: four matrices in float64, such as the Hessian and its inverse."""


@dataclass(frozen=True, slots=True)
class CalibrationFootprint:
    """Bytes: ``model`` whatever the text, ``streams`` for the hidden states of its tokens."""

    model: int
    streams: int


def calibration_footprint(config: ModelConfig, tokens: int) -> CalibrationFootprint:
    """At the most, for a text of so many tokens."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    weights = footprint(config, torch.float32, Quantization(), packed=False)
    matrices = ((qkv, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
    rounding = max(math.prod(shape) * _ROUNDED + shape[1] ** 2 * _CORRELATED for shape in matrices)
    layer = sum(map(math.prod, matrices)) * torch.float32.itemsize
    vocabulary = config.vocab_size * hidden * torch.float32.itemsize
    written = min(weights.resident, SHARD_BYTES + max(layer, vocabulary))
    # Of both streams a layer keeps what goes into each of its matrices, until the last is rounded.
    features = 6 * inner + 2 * qkv + 2 * queries + 10 * hidden
    return CalibrationFootprint(
        model=written + max(weights.transient, rounding),
        streams=tokens * features * torch.float32.itemsize,
    )
