"""Rounds a decoder layer by layer, each with the inputs that the rounded ones before it give.

Two streams of hidden states go through the model side by side: what the exact model computes, and
what the model computes of which all layers so far are rounded. A matrix that adds to the residual
stream is asked for the exact sum, not for its own product alone: each layer thereby takes back
what it can of the error so far.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from kvasir.worker.calibration.gptq import round_matrix
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.reader import (
    ATTENTION_NORM,
    DOWN,
    GATE,
    MLP_NORM,
    OUTPUT,
    QK_NORM,
    QKV,
    UP,
)
from kvasir.worker.model.rope import rotate, rotation_tables
from kvasir.worker.model.weights import EMBEDDING, WeightSource, expected_shapes, finite, layer_name

_DAMAGED = "use a checkpoint that is not damaged"


@dataclass(frozen=True, slots=True)
class Streams:
    """The same rows in the exact and in the rounded model, float32 [tokens, features]."""

    exact: Tensor
    rounded: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Streams":
        return Streams(function(self.exact), function(self.rounded))

    def plus(self, other: "Streams") -> "Streams":
        return Streams(self.exact + other.exact, self.rounded + other.rounded)


class Calibration:
    """A model's tensors, one after the other, its layers' matrices on int4's grid."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        windows: Tensor,
        progress: Callable[[str], None],
    ) -> None:
        """``windows`` are token ids of the text, int64 [count, size]."""
        self._config = config
        self._source = source
        self._windows = windows
        self._progress = progress
        self._names = expected_shapes(config)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and values of every tensor of the decoder, float32, in the order of its layers.

        Raises:
            ModelError: a tensor that cannot be rounded, with its name.
        """
        streams = self._embedded()
        for layer in range(self._config.num_layers):
            self._progress(f"rounding layer {layer + 1} of {self._config.num_layers}")
            rounded: dict[str, Tensor] = {}
            streams = self._layer(layer, streams, rounded)
            prefix = layer_name(layer, "")
            for name in self._names:
                if name.startswith(prefix):
                    yield name, rounded[name] if name in rounded else self._read(name)
        for name in self._names:
            if not name.startswith("model.layers."):
                yield name, self._read(name)

    def _embedded(self) -> Streams:
        hidden = self._read(EMBEDDING)[self._windows.flatten()]
        return Streams(hidden, hidden)

    def _layer(self, layer: int, residual: Streams, rounded: dict[str, Tensor]) -> Streams:
        hidden = residual.map(self._norm(layer, ATTENTION_NORM))
        qkv = self._project(layer, QKV, hidden, None, rounded)
        qk_norm = [self._norm(layer, part) for part in QK_NORM] if self._config.qk_norm else None
        attended = qkv.map(lambda rows: self._attend(rows, qk_norm))
        residual = residual.plus(self._project(layer, (OUTPUT,), attended, residual, rounded))
        hidden = residual.map(self._norm(layer, MLP_NORM))
        gate_up = self._project(layer, (GATE, UP), hidden, None, rounded)
        inner = gate_up.map(_gated)
        return residual.plus(self._project(layer, (DOWN,), inner, residual, rounded))

    def _project(
        self,
        layer: int,
        parts: tuple[str, ...],
        inputs: Streams,
        residual: Streams | None,
        rounded: dict[str, Tensor],
    ) -> Streams:
        """Round matrices of the same inputs, as one; the products of both streams."""
        names = [layer_name(layer, f"{part}.weight") for part in parts]
        weight = torch.cat([self._read(name) for name in names])
        biases = [layer_name(layer, f"{part}.bias") for part in parts]
        has_bias = biases[0] in self._names
        bias = torch.cat([self._read(name) for name in biases]) if has_bias else None
        exact = linear(inputs.exact, weight, bias)
        missing = exact - linear(inputs.rounded, weight, bias)
        if residual is not None:
            missing += residual.exact - residual.rounded
        try:
            found = round_matrix(weight, inputs.rounded, missing)
        except ArithmeticError as error:
            raise ModelError(
                "model", f"{' and '.join(names)} cannot be rounded to int4 ({error})", _DAMAGED
            ) from error
        sizes = [self._names[name][0] for name in names]
        rounded |= zip(names, torch.split(found, sizes), strict=True)
        return Streams(exact, linear(inputs.rounded, found, bias))

    def _norm(self, layer: int, part: str) -> Callable[[Tensor], Tensor]:
        weight = self._read(layer_name(layer, f"{part}.weight"))
        return lambda rows: rms_norm(rows, weight.shape, weight, self._config.rms_norm_eps)

    def _attend(self, qkv: Tensor, qk_norm: list[Callable[[Tensor], Tensor]] | None) -> Tensor:
        """Causal attention within each window: [tokens, heads * head_dim]."""
        config = self._config
        count, size = self._windows.shape
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        heads = qkv.view(count * size, -1, config.head_dim)
        queries, keys, values = torch.split(heads, sizes, 1)
        if qk_norm is not None:
            queries, keys = qk_norm[0](queries), qk_norm[1](keys)
        cos, sin = (table.repeat(count, 1, 1) for table in rotation_tables(config, size))

        def by_head(rows: Tensor) -> Tensor:
            return rows.reshape(count, size, -1, config.head_dim).transpose(1, 2)

        attended = scaled_dot_product_attention(
            by_head(rotate(queries, cos, sin)),
            by_head(rotate(keys, cos, sin)),
            by_head(values),
            is_causal=True,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).reshape(count * size, -1)

    def _read(self, name: str) -> Tensor:
        """float32, all finite."""
        return finite(self._source.read(name).float(), name)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
