"""The forward pass of a Llama-family decoder over a flat batch of tokens.

One implementation for every architecture in ``config.MODEL_TYPES``. Rows of the batch are
tokens of any mix of sequences; only attention knows which belong together. The residual
stream, norms and rotations are float32 whatever the weights' dtype: they are a small part
of the work and most of the rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from kvasir.worker.model.attention import AttentionBatch, attend
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.kv_cache import KvCache
from kvasir.worker.model.rope import rotate, rotation_tables
from kvasir.worker.model.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    WeightSource,
    expected_shapes,
    layer_name,
)


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight [out, in] and bias [out], in the model's dtype."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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


class Decoder:
    """Weights on one device, and the forward pass. Stateless: the KV cache is passed in."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        progress: Callable[[str], None],
    ) -> None:
        """Read all weights; ``progress`` gets a line after each layer."""
        self.config = config
        self.device = device
        reader = _Reader(config, source, dtype, device)
        self._embedding = reader.matrix(EMBEDDING)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(reader.layer(index))
            progress(f"reading weights {reader.count} of {reader.total}")
        self._final_norm = reader.norm(FINAL_NORM)
        self._head = self._embedding if config.tied_embeddings else reader.matrix(LM_HEAD)
        progress(f"reading weights {reader.count} of {reader.total}")
        cos, sin = rotation_tables(config, max_positions)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, cache: KvCache
    ) -> Tensor:
        """Compute all tokens and write their KV.

        Args:
            token_ids, positions: int64 [N], in the row order of ``batch``.

        Returns:
            Hidden states after the final norm, [N, hidden_size], in the weights' dtype.
        """
        cos, sin = self._cos[positions], self._sin[positions]
        residual = self._embedding[token_ids].float()
        for index, layer in enumerate(self._layers):
            hidden = self._norm(residual, layer.attention_norm)
            queries = self._project(layer, index, hidden, (cos, sin), batch, cache)
            residual += layer.output(attend(queries, index, batch, cache).flatten(1))
            gate, up = layer.gate_up(self._norm(residual, layer.mlp_norm)).chunk(2, dim=-1)
            residual += layer.down(silu(gate) * up)
        return self._norm(residual, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab_size] of hidden states that ``forward`` returned."""
        return linear(hidden, self._head).float()

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
        return normed.to(self._embedding.dtype)


class _Reader:
    """Reads tensors once each, counts them, and fuses what is used together."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._source = source
        self._names = expected_shapes(config)
        self._dtype = dtype
        self._device = device
        self.count = 0
        self.total = len(self._names)

    def matrix(self, name: str) -> Tensor:
        self.count += 1
        return self._source.read(name).to(self._device, self._dtype).contiguous()

    def norm(self, name: str) -> Tensor:
        self.count += 1
        return self._source.read(name).to(self._device, torch.float32)

    def layer(self, index: int) -> Layer:
        return Layer(
            attention_norm=self.norm(layer_name(index, "input_layernorm.weight")),
            qkv=self._linear(index, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output=self._linear(index, "self_attn.o_proj"),
            mlp_norm=self.norm(layer_name(index, "post_attention_layernorm.weight")),
            gate_up=self._linear(index, "mlp.gate_proj", "mlp.up_proj"),
            down=self._linear(index, "mlp.down_proj"),
            qk_norm=self._qk_norm(index) if self._config.qk_norm else None,
        )

    def _linear(self, index: int, *parts: str) -> Linear:
        weights = [self.matrix(layer_name(index, f"{part}.weight")) for part in parts]
        biases = [
            self.matrix(name)
            for part in parts
            if (name := layer_name(index, f"{part}.bias")) in self._names
        ]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _qk_norm(self, index: int) -> Tensor:
        query = self.norm(layer_name(index, "self_attn.q_norm.weight"))
        key = self.norm(layer_name(index, "self_attn.k_norm.weight"))
        heads = (self._config.num_heads, self._config.num_kv_heads)
        return torch.cat((query.expand(heads[0], -1), key.expand(heads[1], -1)))
