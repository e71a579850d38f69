"""Values of GGUF tensors from their bytes.

The types of most files are decoded here, in a few passes over the whole tensor; the rest through
the ``gguf`` package, which goes row by row. All give its float32 values bit by bit.
"""

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kvasir.worker.model.gguf_file import GgufError, GgufReader, TensorInfo, tensor_size


class UnsupportedTypeError(Exception):
    """The name of a type that nobody here can decode."""


def read_tensor(file: GgufReader, tensor: TensorInfo) -> Tensor:
    """float32, or float16 or bfloat16 where the file has them; a copy.

    Raises:
        UnsupportedTypeError: of a type that is none of ours.
        GgufError: the file is broken.
    """
    kind = type_of(tensor)
    size = stored_size(tensor)
    stored = file.bytes_at(tensor, size)
    if kind in _PLAIN:
        values = torch.from_numpy(stored.copy()).view(_PLAIN[kind])
    elif kind in _BLOCKS:
        block_bytes = GGML_QUANT_SIZES[kind][1]
        values = _BLOCKS[kind](torch.from_numpy(stored.copy()).view(-1, block_bytes))
    else:
        values = _decoded(stored, kind)
    file.release(tensor, size)
    return values.view(tensor.shape)


def type_of(tensor: TensorInfo) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(tensor.kind)
    except ValueError as error:
        raise GgufError(f"tensor {tensor.name} has the unknown type {tensor.kind}") from error


def stored_size(tensor: TensorInfo) -> int:
    return tensor_size(tensor, *GGML_QUANT_SIZES[type_of(tensor)])


def _decoded(stored: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    from gguf.quants import dequantize

    rows = stored.reshape(-1, GGML_QUANT_SIZES[kind][1])
    try:
        return torch.from_numpy(dequantize(rows, kind))
    except NotImplementedError as error:
        raise UnsupportedTypeError(kind.name) from error


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte offset of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """32 values of 4 bits: the low halves of 16 bytes, then the high ones."""
    packed = blocks[:, at : at + 16]
    return torch.cat((packed & 15, packed >> 4), 1).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 2).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_BLOCKS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
}
