"""Weight matrices in the layouts that the kernels read; see cpp/gemm.h.

A kind is one layout and one way to multiply; PackedLinear is the seam where others are added.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.worker.kernels.memory import huge_copy

BLOCK = 16
"""Outputs in a block; sizes are padded with zeros to multiples of it."""


class PackedKind(IntEnum):
    """As Kind in cpp/gemm.h."""

    BF16 = 0


class CMatrix(ctypes.Structure):
    """Matrix of cpp/gemm.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """One matrix: [outputs, inputs] of the model, padded and packed.

    ``bias`` is float32 [padded outputs], or None.
    """

    kind: PackedKind
    outputs: int
    inputs: int
    weights: Tensor
    bias: Tensor | None

    @property
    def padded_outputs(self) -> int:
        return padded(self.outputs)

    @property
    def padded_inputs(self) -> int:
        return padded(self.inputs)

    def descriptor(self) -> CMatrix:
        """What C++ gets; valid while this object lives."""
        return CMatrix(
            kind=self.kind,
            outputs=self.padded_outputs,
            inputs=self.padded_inputs,
            weights=self.weights.data_ptr(),
            scales=None,
            bias=None if self.bias is None else self.bias.data_ptr(),
        )


def pack_bf16(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack a bfloat16 matrix [outputs, inputs] and its bias [outputs]."""
    outputs, inputs = weight.shape
    filled = pad(weight, (0, padded(inputs) - inputs, 0, padded(outputs) - outputs)).contiguous()
    # A pair of inputs is one 32-bit word; words of 16 outputs lie side by side.
    words = filled.view(torch.int32).view(-1, BLOCK, padded(inputs) // 2)
    return PackedLinear(
        kind=PackedKind.BF16,
        outputs=outputs,
        inputs=inputs,
        weights=huge_copy(words.transpose(1, 2)),
        bias=None if bias is None else pad(bias.float(), (0, padded(outputs) - outputs)),
    )


def interleave_blocks(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both, in turn 16 of ``gate`` and 16 of ``up``, each filled to whole blocks."""
    short = padded(len(gate)) - len(gate)
    filled = [pad(part, (0, 0) * (part.dim() - 1) + (0, short)) for part in (gate, up)]
    blocks = [part.view(-1, BLOCK, *part.shape[1:]) for part in filled]
    return torch.stack(blocks, 1).reshape(-1, *gate.shape[1:])


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
