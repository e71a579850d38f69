"""The forward pass of a Llama-family decoder over a flat batch of tokens.

One implementation for every architecture in ``config.MODEL_TYPES``. Rows of the batch are
tokens of any mix of sequences; only attention knows which belong together. The residual
stream, norms and rotations are float32 whatever the weights' dtype: they are a small part
of the work and most of the rounding.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from kvasir.worker.contracts import Chunk
from kvasir.worker.model.attention import AttentionBatch, attend, build_batch
from kvasir.worker.model.kv_cache import KvCache
from kvasir.worker.model.linear import Linear, make_linear
from kvasir.worker.model.quantization import Quantization
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
from kvasir.worker.model.rope import rotate, rotation_tables
from kvasir.worker.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD
from kvasir.worker.sampling.sampler import check_finite


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; norms are float32.

    ``qkv`` stacks the rows of Q, K and V, ``gate_up`` those of gate and up: one matrix
    product instead of three or two. ``qk_norm`` [heads + kv_heads, head_dim] is Qwen3's.
    """

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    qk_norm: Tensor | None


class TorchDecoder:
    """Weights on one device, and the forward pass. Stateless: the KV cache is passed in."""

    def __init__(
        self,
        reader: WeightReader,
        *,
        dtype: torch.dtype,
        quantization: Quantization,
        max_positions: int,
    ) -> None:
        """Read all weights. ``dtype`` is that of activations, and of weights that stay plain."""
        config = reader.config
        self.config = config
        self.device = reader.device
        self._dtype = dtype
        self._quantization = quantization
        self._embedding = self._vocabulary(reader, EMBEDDING)
        self._layers = [self._read_layer(reader, index) for index in range(config.num_layers)]
        self._final_norm = reader.norm(FINAL_NORM)
        self._head = (
            self._embedding if config.tied_embeddings else self._vocabulary(reader, LM_HEAD)
        )
        reader.done()
        cos, sin = rotation_tables(config, max_positions)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)

    @property
    def weight_bytes(self) -> int:
        linears = [self._embedding]
        if self._head is not self._embedding:
            linears.append(self._head)
        for layer in self._layers:
            linears += (layer.qkv, layer.output, layer.gate_up, layer.down)
        return sum(linear.num_bytes for linear in linears)

    def forward(self, chunks: Sequence[Chunk], cache: KvCache) -> Tensor:
        """As the protocol in backend.py; hidden states are in the weights' dtype."""
        tokens = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
        spans = (range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks)
        return self._forward(
            torch.tensor(tokens, device=self.device),
            torch.tensor(list(chain.from_iterable(spans)), device=self.device),
            build_batch(chunks, self.config.num_heads // self.config.num_kv_heads, cache),
            cache,
        )

    def first_layers(self, count: int) -> "TorchDecoder":
        shallow = copy(self)
        shallow._layers = self._layers[:count]
        return shallow

    def _forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, cache: KvCache
    ) -> Tensor:
        cos, sin = self._cos[positions], self._sin[positions]
        residual = self._embedding.rows(token_ids)
        for index, layer in enumerate(self._layers):
            hidden = self._norm(residual, layer.attention_norm)
            queries = self._project(layer, index, hidden, (cos, sin), batch, cache)
            residual += layer.output(attend(queries, index, batch, cache).flatten(1))
            gate, up = layer.gate_up(self._norm(residual, layer.mlp_norm)).chunk(2, dim=-1)
            residual += layer.down(silu(gate) * up)
        return self._norm(residual, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab_size] of hidden states that ``forward`` returned."""
        return self._head(hidden).float()

    def likeliest(self, hidden: Tensor) -> list[int]:
        logits = self.logits(hidden)
        check_finite(logits)
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens

    def _project(
        self,
        layer: Layer,
        index: int,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        cache: KvCache,
    ) -> Tensor:
        """Write K and V of the rows; return Q [N, kv_heads, group, head_dim]."""
        config = self.config
        heads = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        rotated_heads = config.num_heads + config.num_kv_heads
        queries_keys = heads[:, :rotated_heads].float()
        if layer.qk_norm is not None:
            normed = rms_norm(queries_keys, (config.head_dim,), eps=config.rms_norm_eps)
            queries_keys = normed * layer.qk_norm
        queries_keys = rotate(queries_keys, *rotation).to(heads.dtype)
        keys = queries_keys[:, config.num_heads :]
        cache.write(index, batch.token_rows, keys, heads[:, rotated_heads:])
        queries = queries_keys[:, : config.num_heads]
        group = config.num_heads // config.num_kv_heads
        return queries.view(-1, config.num_kv_heads, group, config.head_dim)

    def _norm(self, residual: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(residual, weight.shape, weight, self.config.rms_norm_eps)
        return normed.to(self._dtype)

    def _vocabulary(self, reader: WeightReader, name: str) -> Linear:
        weight = self._quantization.vocabulary(reader.matrix(name))
        return make_linear(weight, None, self._dtype, self._quantization.activations == "int8")

    def _linear(self, reader: WeightReader, index: int, *parts: str) -> Linear:
        weight, bias = reader.stacked(index, *parts)
        rounded = self._quantization.matrix(weight, weight_names(index, *parts))
        return make_linear(rounded, bias, self._dtype, self._quantization.activations == "int8")

    def _read_layer(self, reader: WeightReader, index: int) -> Layer:
        return Layer(
            attention_norm=reader.layer_norm(index, ATTENTION_NORM),
            qkv=self._linear(reader, index, *QKV),
            output=self._linear(reader, index, OUTPUT),
            mlp_norm=reader.layer_norm(index, MLP_NORM),
            gate_up=self._linear(reader, index, GATE, UP),
            down=self._linear(reader, index, DOWN),
            qk_norm=_qk_norm(reader, index),
        )


def _qk_norm(reader: WeightReader, index: int) -> Tensor | None:
    config = reader.config
    if not config.qk_norm:
        return None
    query, key = (reader.layer_norm(index, name) for name in QK_NORM)
    return torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
