"""Matrix products of TorchDecoder, with weights in any of the forms of quantization.py.

Rounded weights stay rounded in memory and are widened for each product: less memory, not more
speed. They say what the CPU kernels compute, and serve devices that have none.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvasir.worker.model.quantization import Int4Weight, Int8Weight, Weight, quantize_int8


class Linear(Protocol):
    """A matrix [outputs, inputs], with a bias or without. The dtype is that of ``x``."""

    @property
    def num_bytes(self) -> int:
        """Of the weights, scales included."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """The product with rows [rows, inputs]."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the matrix, float32 [count, inputs]: it is also the embedding."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Weight and bias in the model's dtype."""

    weight: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index].float()


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """The product of integers is exact; scales come after it. The bias is float32."""

    weight: Int8Weight
    bias: Tensor | None
    int8_activations: bool

    @property
    def num_bytes(self) -> int:
        return self.weight.values.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.int8_activations:
            rounded = quantize_int8(x)
            # float32 holds sums of 1,040 products of two int8 exactly, and longer ones nearly.
            sums = linear(rounded.values.float(), self.weight.values.float())
            sums = sums * rounded.scales[:, None]
        else:
            sums = linear(x, self.weight.values.to(x.dtype)).float()
        result = sums * self.weight.scales
        return (result if self.bias is None else result + self.bias).to(x.dtype)

    def rows(self, index: Tensor) -> Tensor:
        return self.weight.values[index].float() * self.weight.scales[index, None]


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """Widened to the dtype of the activations, as the CPU kernels do.

    A code has a byte of its own here: half of it is given away for simplicity.
    """

    weight: Int4Weight
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return sum(
            part.nbytes for part in (self.weight.codes, self.weight.scales, self.weight.minima)
        )

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.dequantized().to(x.dtype), bias)

    def rows(self, index: Tensor) -> Tensor:
        return self.weight.dequantized()[index]


def make_linear(
    weight: Weight, bias: Tensor | None, dtype: torch.dtype, int8_activations: bool
) -> Linear:
    """``dtype`` is that of plain weights; ``bias`` may be of any."""
    match weight:
        case Int8Weight():
            return Int8Linear(weight, None if bias is None else bias.float(), int8_activations)
        case Int4Weight():
            return Int4Linear(weight, bias)
        case _:
            return PlainLinear(weight.to(dtype), None if bias is None else bias.to(dtype))
