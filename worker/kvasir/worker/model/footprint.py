"""How much memory a model's weights take: in place, and while they are read. Pure.

Counted from shapes, before anything is read. What else a process holds, such as the interpreter,
torch's libraries and the activations of a step, is not counted.
"""

import math
from dataclasses import dataclass

import torch

from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.quantization import GROUP, Quantization
from kvasir.worker.model.weights import EMBEDDING, LM_HEAD, expected_shapes

_PLAIN = 11
"""Bytes per weight while a plain matrix is read: the source's float32, and copies."""
_ROUNDED = 18
"""The same for one that is quantized: the source's float32, and what rounding computes with it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. While the weights are read, at most ``transient`` come on top of ``resident``."""

    resident: int
    transient: int

    @property
    def loading(self) -> int:
        return self.resident + self.transient


def footprint(
    model: ModelConfig, dtype: torch.dtype, quantization: Quantization, *, packed: bool
) -> Footprint:
    """``packed``: as the CPU kernels hold them; else as torch does, a byte for each 4-bit code."""
    resident = 0
    for name, shape in expected_shapes(model).items():
        if len(shape) == 1:
            resident += math.prod(shape) * torch.float32.itemsize
        else:
            form = quantization.weights
            if form == "int4" and name in (EMBEDDING, LM_HEAD):
                form = "int8"
            resident += _matrix_bytes(shape, form, dtype, packed=packed)
    vocabulary = model.vocab_size * model.hidden_size
    gate_and_up = 2 * model.intermediate_size * model.hidden_size
    per_weight = _PLAIN if quantization.weights == "none" else _ROUNDED
    return Footprint(resident, max(vocabulary, gate_and_up) * per_weight)


def _matrix_bytes(shape: tuple[int, ...], form: str, dtype: torch.dtype, *, packed: bool) -> int:
    outputs, inputs = shape
    match form:
        case "int8":  # a scale for each output; packed, also the sum of its weights
            return outputs * (inputs + (8 if packed else 4))
        case "int4":  # a scale and a minimum for each group
            codes = GROUP // 2 if packed else GROUP
            return outputs * -(-inputs // GROUP) * (codes + 4)
        case _:  # packed bfloat16 is a quarter smaller if it can be coded, which its values decide
            return outputs * inputs * dtype.itemsize
