"""Weight matrices in the layouts that the kernels read; see cpp/gemm.h.

A kind is one layout and one way to multiply; PackedLinear is the seam where others are added.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16
"""Outputs in a block; sizes are padded with zeros to multiples of it."""


class PackedKind(IntEnum):
    """As Kind in cpp/gemm.h."""

    BF16 = 0
    INT8 = 1
    INT8_ACTIVATIONS = 2
    """INT8, and the rows it is multiplied with are rounded to int8 as well."""
    INT4 = 3
    CODED_BF16 = 4
    """BF16 without loss in 12 bits a weight; see cpp/coded.h."""


class CMatrix(ctypes.Structure):
    """Matrix of cpp/gemm.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class PackedLinear:
    """One matrix: [outputs, inputs] of the model, padded and packed.

    ``bias`` is float32 [padded outputs], or None. ``scales`` and ``sums`` are those of int8:
    float32, and int32 sums of each output's weights, both [padded outputs].
    """

    kind: PackedKind
    outputs: int
    inputs: int
    weights: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    sums: Tensor | None = None

    @property
    def padded_outputs(self) -> int:
        return padded(self.outputs)

    @property
    def padded_inputs(self) -> int:
        return padded(self.inputs)

    @cached_property
    def descriptor(self) -> CMatrix:
        """What C++ gets; valid while this object lives."""
        return CMatrix(
            kind=self.kind,
            outputs=self.padded_outputs,
            inputs=self.padded_inputs,
            weights=self.weights.data_ptr(),
            scales=_pointer(self.scales),
            sums=_pointer(self.sums),
            bias=_pointer(self.bias),
        )


Keep = Callable[[Tensor], Tensor]
"""Makes the contiguous copy of the weights that stays."""


def pack_bf16(
    weight: Tensor, bias: Tensor | None = None, *, keep: Keep = Tensor.contiguous
) -> PackedLinear:
    """Pack a bfloat16 matrix [outputs, inputs] and its bias [outputs]."""
    outputs, inputs = weight.shape
    filled = pad(weight, (0, padded(inputs) - inputs, 0, padded(outputs) - outputs)).contiguous()
    # A pair of inputs is one 32-bit word; words of 16 outputs lie side by side.
    words = filled.view(torch.int32).view(-1, BLOCK, padded(inputs) // 2)
    return PackedLinear(
        kind=PackedKind.BF16,
        outputs=outputs,
        inputs=inputs,
        weights=keep(words.transpose(1, 2)),
        bias=None if bias is None else pad(bias.float(), (0, padded(outputs) - outputs)),
    )


def pack_int8(
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    int8_activations: bool = False,
    keep: Keep = Tensor.contiguous,
) -> PackedLinear:
    """Pack int8 values [outputs, inputs] with their scales [outputs]; see cpp/int8.h."""
    outputs, inputs = values.shape
    short = padded(outputs) - outputs
    filled = pad(values, (0, padded(inputs) - inputs, 0, short)).contiguous()
    # Four inputs are one 32-bit word; words of 16 outputs lie side by side.
    words = filled.view(torch.int32).view(-1, BLOCK, padded(inputs) // 4)
    return PackedLinear(
        kind=PackedKind.INT8_ACTIVATIONS if int8_activations else PackedKind.INT8,
        outputs=outputs,
        inputs=inputs,
        weights=keep(words.transpose(1, 2)),
        bias=None if bias is None else pad(bias.float(), (0, short)),
        scales=pad(scales.float(), (0, short)),
        sums=filled.sum(1, dtype=torch.int32),
    )


def pack_int4(
    codes: Tensor,
    scales: Tensor,
    minima: Tensor,
    inputs: int,
    bias: Tensor | None = None,
    *,
    keep: Keep = Tensor.contiguous,
) -> PackedLinear:
    """Pack a matrix of 4-bit codes: see cpp/int4.h.

    Args:
        codes: uint8 below 16, [outputs, groups, 32]; beyond ``inputs`` they mean nothing.
        scales, minima: float16 [outputs, groups].
        bias: [outputs].
        keep: see Keep.
    """
    outputs, groups, size = codes.shape
    short = padded(outputs) - outputs
    by_block = [
        pad(part, (0, 0, 0, short)).view(-1, BLOCK, groups).transpose(1, 2).contiguous()
        for part in (scales, minima)
    ]
    # [block, output, group, half, word's code, parity], the codes of a word last.
    split = pad(codes, (0, 0, 0, 0, 0, short)).view(-1, BLOCK, groups, 2, size // 4, 2)
    nibbles = split.permute(0, 2, 3, 1, 5, 4).reshape(-1, groups, BLOCK * size // 2, 2)
    lines = [part.view(torch.uint8) for part in by_block]
    lines.append(nibbles[..., 0] | nibbles[..., 1] << 4)
    return PackedLinear(
        kind=PackedKind.INT4,
        outputs=outputs,
        inputs=inputs,
        weights=keep(torch.cat(lines, -1)),
        bias=None if bias is None else pad(bias.float(), (0, short)),
    )


def interleave_blocks(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both, in turn 16 of ``gate`` and 16 of ``up``, each filled to whole blocks."""
    short = padded(len(gate)) - len(gate)
    filled = [pad(part, (0, 0) * (part.dim() - 1) + (0, short)) for part in (gate, up)]
    blocks = [part.view(-1, BLOCK, *part.shape[1:]) for part in filled]
    return torch.stack(blocks, 1).reshape(-1, *gate.shape[1:])


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
