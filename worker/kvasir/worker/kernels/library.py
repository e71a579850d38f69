"""The kernels' C interface: one shared library per process, for the best target there is.

``find_kernels`` looks for a library that installation built, then in the user's cache, then
builds one into the cache. The structures mirror those of cpp/step.h, attention.h and gemm.h;
their sizes are compared at load.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvasir.worker.kernels import build
from kvasir.worker.kernels.packed import BLOCK, CMatrix, PackedKind, PackedLinear
from kvasir.worker.kernels.targets import Target, usable_targets

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int32
_Float = ctypes.c_float

_EXCEPTION_BYTES = 8
_CODED_BLOCK_BYTES = 64 + _EXCEPTION_BYTES
"""Of a block coded as in cpp/coded.h, beside its weights: the header, and the last exception."""


class CLayer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _Pointer),
        ("qk_norm", _Pointer),
        ("mlp_norm", _Pointer),
        ("qkv", CMatrix),
        ("output", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        ("hidden", _Int),
        ("intermediate", _Int),
        ("num_layers", _Int),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_dim", _Int),
        ("epsilon", _Float),
        ("layers", ctypes.POINTER(CLayer)),
        ("embedding", ctypes.POINTER(CMatrix)),
        ("final_norm", _Pointer),
        ("cos", _Pointer),
        ("sin", _Pointer),
    )


class CBatch(ctypes.Structure):
    _fields_ = (
        ("tokens", _Int),
        ("sequences", _Int),
        ("table_size", _Int),
        ("token_ids", _Pointer),
        ("starts", _Pointer),
        ("counts", _Pointer),
        ("tables", _Pointer),
    )


class CCache(ctypes.Structure):
    _fields_ = (
        ("data", _Pointer),
        ("layers", _Int),
        ("block_size", _Int),
        ("kv_heads", _Int),
        ("head_dim", _Int),
    )


_STRUCTURES = (CMatrix, CLayer, CModel, CBatch, CCache)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "kvasir_create": (_Int,),
    "kvasir_destroy": (_Pointer,),
    "kvasir_forward": (_Pointer,) * 5,
    "kvasir_logits": (_Pointer, _Pointer, _Pointer, _Int, _Int, _Pointer),
    "kvasir_likeliest": (_Pointer, _Pointer, _Pointer, _Int, _Int, _Pointer),
    "kvasir_code": (_Pointer, _Pointer, ctypes.c_int64),
    "kvasir_rms_norm": (_Pointer, _Pointer, _Int, _Int, _Float, _Pointer),
    "kvasir_rotate": (_Pointer, _Pointer, _Float, _Pointer, _Pointer, _Int, _Int, _Pointer),
    "kvasir_attend": (_Pointer, _Int, _Pointer, _Int, _Int, _Int, _Int, _Int, _Pointer, _Pointer),
    "kvasir_sizes": (_Pointer,),
}


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why there are no kernels; one line."""

    reason: str


class Kernels:
    """A loaded library. Tensors handed over are contiguous, on the CPU, and of the dtype named."""

    def __init__(self, path: Path, target: str) -> None:
        self.target = target
        self._library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = None
        self._library.kvasir_create.restype = _Pointer
        self._library.kvasir_code.restype = ctypes.c_int64
        sizes = (ctypes.c_int32 * len(_STRUCTURES))()
        self._library.kvasir_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(structure) for structure in _STRUCTURES]:
            raise RuntimeError(f"{path} has structures of other sizes: {list(sizes)}")

    def create(self, threads: int) -> int:
        """An engine with its own threads; give it back with ``destroy``."""
        return int(self._library.kvasir_create(threads))

    def destroy(self, engine: int) -> None:
        self._library.kvasir_destroy(engine)

    def forward(
        self, engine: int, model: CModel, batch: CBatch, cache: CCache, hidden: Tensor
    ) -> None:
        """Compute ``batch`` into ``hidden``, bfloat16 [tokens, padded hidden]."""
        self._library.kvasir_forward(
            engine,
            ctypes.byref(model),
            ctypes.byref(batch),
            ctypes.byref(cache),
            hidden.data_ptr(),
        )

    def logits(self, engine: int, matrix: PackedLinear, hidden: Tensor) -> Tensor:
        """Float32 [rows, outputs] of bfloat16 rows [rows, padded inputs]."""
        out = torch.empty(len(hidden), matrix.outputs)
        self._library.kvasir_logits(
            engine,
            ctypes.byref(matrix.descriptor),
            hidden.data_ptr(),
            len(hidden),
            matrix.outputs,
            out.data_ptr(),
        )
        return out

    def likeliest(self, engine: int, matrix: PackedLinear, hidden: Tensor) -> list[int]:
        """The greatest output of each row of ``logits``; -1 if some are not finite."""
        rows = len(hidden)
        out = (ctypes.c_int32 * rows)()
        self._library.kvasir_likeliest(
            engine,
            ctypes.byref(matrix.descriptor),
            hidden.data_ptr(),
            rows,
            matrix.outputs,
            out,
        )
        return list(out)

    def coded(self, plain: PackedLinear) -> PackedLinear:
        """A BF16 matrix as CODED_BF16; as it is if more than one weight in 1,000 has no code."""
        weights = plain.padded_outputs * plain.padded_inputs
        blocks = plain.padded_outputs // BLOCK
        room = weights * 3 // 2 + blocks * _CODED_BLOCK_BYTES + weights // 1000 * _EXCEPTION_BYTES
        out = torch.empty(room, dtype=torch.uint8)
        taken = self._library.kvasir_code(ctypes.byref(plain.descriptor), out.data_ptr(), room)
        if not taken:
            return plain
        return replace(plain, kind=PackedKind.CODED_BF16, weights=out[:taken])

    def rms_norm(self, x: Tensor, weight: Tensor, size: int, epsilon: float) -> Tensor:
        """Of float32 rows padded with zeros, as bfloat16; ``weight`` is padded alike."""
        out = torch.empty_like(x, dtype=torch.bfloat16)
        self._library.kvasir_rms_norm(
            x.data_ptr(), weight.data_ptr(), len(x), size, epsilon, out.data_ptr()
        )
        return out

    def rotate(
        self, heads: Tensor, weight: Tensor | None, epsilon: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Float32 heads [rows, head_dim], normalized if there is a weight, turned, as bfloat16."""
        out = torch.empty_like(heads, dtype=torch.bfloat16)
        self._library.kvasir_rotate(
            heads.data_ptr(),
            None if weight is None else weight.data_ptr(),
            epsilon,
            cos.data_ptr(),
            sin.data_ptr(),
            *heads.shape,
            out.data_ptr(),
        )
        return out

    def attend(
        self,
        cache: CCache,
        layer: int,
        table: Tensor,
        start: int,
        heads: range,
        queries: Tensor,
    ) -> Tensor:
        """Attention of one sequence's queries [count, kv_heads, group, head_dim], bfloat16.

        Only the KV heads in ``heads`` are computed, the others left zero. ``table`` is int32.
        """
        out = torch.zeros_like(queries)
        count, _, group, _ = queries.shape
        self._library.kvasir_attend(
            ctypes.byref(cache),
            layer,
            table.data_ptr(),
            start,
            count,
            heads.start,
            heads.stop,
            group,
            queries.data_ptr(),
            out.data_ptr(),
        )
        return out


@cache
def find_kernels() -> Kernels | Unavailable:
    """This machine's kernels, built now if need be."""
    targets = usable_targets()
    if not targets:
        return Unavailable("this CPU has no AVX2")
    return load_kernels(targets[0])


def load_kernels(target: Target) -> Kernels | Unavailable:
    """The kernels of one target that this machine can run."""
    path = build.packaged_library(target)
    try:
        if not path.is_file():
            path = build.cached_library(target)
        return Kernels(path, target.name)
    except build.BuildError as error:
        return Unavailable(str(error))
    except OSError as error:
        return Unavailable(f"{path} cannot be loaded ({error})")
