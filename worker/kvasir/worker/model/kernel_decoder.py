"""The decoder on the CPU kernels: bfloat16 weights, packed once, and one call for each step.

The numbers are those of TorchDecoder but for rounding: the residual stream, norms, rotations
and all sums are float32. A row's result does not depend on the rest of the batch.
"""

import ctypes
import weakref
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.worker.contracts import Chunk
from kvasir.worker.kernels.library import CBatch, CCache, CLayer, CModel, Kernels
from kvasir.worker.kernels.memory import HugePages
from kvasir.worker.kernels.packed import (
    PackedLinear,
    interleave_blocks,
    pack_bf16,
    pack_int4,
    pack_int8,
    padded,
)
from kvasir.worker.model.kv_cache import KvCache
from kvasir.worker.model.quantization import Int4Weight, Int8Weight, Quantization, Weight
from kvasir.worker.model.reader import (
    ATTENTION_NORM,
    DOWN,
    GATE,
    MLP_NORM,
    OUTPUT,
    QK_NORM,
    QKV,
    UP,
    WeightReader,
    weight_names,
)
from kvasir.worker.model.rope import frequencies
from kvasir.worker.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD
from kvasir.worker.sampling.sampler import NOT_FINITE


class KernelDecoder:
    """A Decoder (backend.py). Owns its weights, its threads, and what C++ has pointers to."""

    def __init__(
        self,
        reader: WeightReader,
        kernels: Kernels,
        *,
        quantization: Quantization,
        threads: int,
        max_positions: int,
    ) -> None:
        """Read and pack all weights."""
        config = reader.config
        self._config = config
        self._quantization = quantization
        self._kernels = kernels
        self._positions = max_positions
        self._memory = HugePages()
        self._kept: list[Tensor | PackedLinear] = []
        embedding = self._vocabulary(reader, EMBEDDING)
        self._layers = (CLayer * config.num_layers)()
        for index in range(config.num_layers):
            self._layers[index] = self._read_layer(reader, index)
        final_norm = self._pointer(_padded_row(reader.norm(FINAL_NORM)))
        self._head = embedding if config.tied_embeddings else self._vocabulary(reader, LM_HEAD)
        reader.done()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies(config))
        self._embedding = embedding.descriptor
        self._model = CModel(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            epsilon=config.rms_norm_eps,
            layers=self._layers,
            embedding=ctypes.pointer(self._embedding),
            final_norm=final_norm,
            cos=self._pointer(angles.cos()),
            sin=self._pointer(angles.sin()),
        )
        self._whole: KernelDecoder | None = None  # whose end destroys the engine
        self._engine = kernels.create(threads)
        weakref.finalize(self, kernels.destroy, self._engine)

    @property
    def weight_bytes(self) -> int:
        packed = [part for part in self._kept if isinstance(part, PackedLinear)]
        held = (part for matrix in packed for part in (matrix.weights, matrix.scales, matrix.sums))
        return sum(part.nbytes for part in held if part is not None)

    def forward(self, chunks: Sequence[Chunk], cache: KvCache) -> Tensor:
        """As the protocol says; rows are bfloat16 [tokens, padded hidden]."""
        tokens = np.fromiter(
            chain.from_iterable(chunk.token_ids for chunk in chunks), dtype=np.int32
        )
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        counts = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
        tables = np.zeros((len(chunks), max(len(c.block_table) for c in chunks)), dtype=np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.block_table)] = chunk.block_table
        self._check(tokens, starts + counts, tables, cache)
        batch = CBatch(
            tokens=len(tokens),
            sequences=len(chunks),
            table_size=tables.shape[1],
            token_ids=tokens.ctypes.data,
            starts=starts.ctypes.data,
            counts=counts.ctypes.data,
            tables=tables.ctypes.data,
        )
        hidden = torch.empty(len(tokens), padded(self._config.hidden_size), dtype=torch.bfloat16)
        self._kernels.forward(self._engine, self._model, batch, cache_descriptor(cache), hidden)
        return hidden

    def first_layers(self, count: int) -> "KernelDecoder":
        shallow = copy(self)
        shallow._whole = self
        shallow._model = CModel.from_buffer_copy(self._model)
        shallow._model.num_layers = count
        return shallow

    def logits(self, hidden: Tensor) -> Tensor:
        return self._kernels.logits(self._engine, self._head, hidden.contiguous())

    def likeliest(self, hidden: Tensor) -> list[int]:
        tokens = self._kernels.likeliest(self._engine, self._head, hidden.contiguous())
        if min(tokens) < 0:
            raise FloatingPointError(NOT_FINITE)
        return tokens

    def _check(
        self, tokens: np.ndarray, ends: np.ndarray, tables: np.ndarray, cache: KvCache
    ) -> None:
        """C++ trusts its arguments: an index beyond its array must end here."""
        if tokens.min() < 0 or tokens.max() >= self._config.vocab_size:
            raise IndexError("a token id is outside the vocabulary")
        if tables.min() < 0 or tables.max() >= cache.num_blocks:
            raise IndexError("a block id is outside the cache")
        if ends.max() > min(self._positions, tables.shape[1] * cache.block_size):
            raise IndexError("a chunk ends beyond its block table or the longest sequence")

    def _read_layer(self, reader: WeightReader, index: int) -> CLayer:
        gate, gate_bias = reader.linear(index, GATE)
        up, up_bias = reader.linear(index, UP)
        both = None
        if gate_bias is not None and up_bias is not None:
            both = interleave_blocks(gate_bias, up_bias)
        return CLayer(
            attention_norm=self._norm(reader, index, ATTENTION_NORM),
            qk_norm=self._qk_norm(reader, index),
            mlp_norm=self._norm(reader, index, MLP_NORM),
            qkv=self._stacked(reader, index, *QKV).descriptor,
            output=self._stacked(reader, index, OUTPUT).descriptor,
            gate_up=self._packed(
                interleave_blocks(gate, up), both, weight_names(index, GATE, UP)
            ).descriptor,
            down=self._stacked(reader, index, DOWN).descriptor,
        )

    def _norm(self, reader: WeightReader, index: int, part: str) -> int:
        return self._pointer(_padded_row(reader.layer_norm(index, part)))

    def _qk_norm(self, reader: WeightReader, index: int) -> int | None:
        if not self._config.qk_norm:
            return None
        return self._pointer(torch.stack([reader.layer_norm(index, part) for part in QK_NORM]))

    def _vocabulary(self, reader: WeightReader, name: str) -> PackedLinear:
        return self._keep(self._quantization.vocabulary(reader.matrix(name)), None)

    def _stacked(self, reader: WeightReader, index: int, *parts: str) -> PackedLinear:
        return self._packed(*reader.stacked(index, *parts), weight_names(index, *parts))

    def _packed(self, weight: Tensor, bias: Tensor | None, name: str) -> PackedLinear:
        return self._keep(self._quantization.matrix(weight, name), bias)

    def _keep(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        packed = self._pack(weight, bias)
        self._kept.append(packed)
        return packed

    def _pack(self, weight: Weight, bias: Tensor | None) -> PackedLinear:
        keep = self._memory.copy
        match weight:
            case Int8Weight(values, scales):
                rounded = self._quantization.activations == "int8"
                return pack_int8(values, scales, bias, int8_activations=rounded, keep=keep)
            case Int4Weight(codes, scales, minima, inputs):
                return pack_int4(codes, scales, minima, inputs, bias, keep=keep)
            case _:
                coded = self._kernels.coded(pack_bf16(weight, bias))
                return replace(coded, weights=keep(coded.weights))

    def _pointer(self, tensor: Tensor) -> int:
        kept = tensor.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def cache_descriptor(cache: KvCache) -> CCache:
    """What C++ gets of a bfloat16 cache on the CPU; valid while the cache lives."""
    _, layers, _, block_size, kv_heads, head_dim = cache.data.shape
    return CCache(
        data=cache.data.data_ptr(),
        layers=layers,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _padded_row(row: Tensor) -> Tensor:
    return pad(row, (0, padded(len(row)) - len(row)))
