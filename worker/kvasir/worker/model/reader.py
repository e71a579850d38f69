"""Reads a decoder's weights from their source, once each, in the order of the forward pass.

What is used together is stacked here, for every implementation of the decoder alike.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.weights import WeightSource, expected_shapes, finite, layer_name

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = "self_attn.o_proj"
GATE = "mlp.gate_proj"
UP = "mlp.up_proj"
DOWN = "mlp.down_proj"
ATTENTION_NORM = "input_layernorm"
MLP_NORM = "post_attention_layernorm"
QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")


def weight_names(layer: int, *parts: str) -> str:
    """For people: the names of matrices that are used as one."""
    return " and ".join(layer_name(layer, f"{part}.weight") for part in parts)


class WeightReader:
    """Tensors in the wanted dtype on the wanted device; ``progress`` hears of each layer.

    ModelError of a tensor with values that are not finite: what it computes would be noise.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        self.config = config
        self._source = source
        self._names = expected_shapes(config)
        self._dtype = dtype
        self.device = device
        self.progress = progress
        self._count = 0

    def matrix(self, name: str) -> Tensor:
        return self._read(name, self._dtype).contiguous()

    def norm(self, name: str) -> Tensor:
        """Norms are float32, whatever the dtype."""
        return self._read(name, torch.float32)

    def layer_norm(self, layer: int, part: str) -> Tensor:
        return self.norm(layer_name(layer, f"{part}.weight"))

    def linear(self, layer: int, part: str) -> tuple[Tensor, Tensor | None]:
        """Weight [out, in] and bias [out], if the model has one."""
        weight = self.matrix(layer_name(layer, f"{part}.weight"))
        bias = layer_name(layer, f"{part}.bias")
        return weight, self.matrix(bias) if bias in self._names else None

    def stacked(self, layer: int, *parts: str) -> tuple[Tensor, Tensor | None]:
        """The rows of several linear layers as those of one: one product instead of several."""
        weights, biases = zip(*(self.linear(layer, part) for part in parts), strict=True)
        if parts[-1] == DOWN:
            self.done()
        return torch.cat(weights), None if biases[0] is None else torch.cat(biases)

    def done(self) -> None:
        """Tell how far the reading is."""
        self.progress(f"reading weights {self._count} of {len(self._names)}")

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        self._count += 1
        return finite(self._source.read(name).to(self.device, dtype), name)
