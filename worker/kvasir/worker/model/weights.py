"""Which tensors a decoder needs, and the check that a source has them.

Names are those of Hugging Face checkpoints; a source with other names maps them.
"""

from collections.abc import Mapping
from typing import Protocol

import torch

from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class WeightSource(Protocol):
    """Tensors by name; reads one at a time, so that memory holds no second copy of all."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in a floating dtype."""
        ...


def finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The same tensor; a ModelError with its ``name`` if it holds an infinity or NaN.

    Its least and greatest value tell, which takes one pass and a tenth of the time of isfinite.
    """
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        raise ModelError(
            "model",
            f"{name} holds values that are not finite in {tensor.dtype}",
            "use a checkpoint that is not damaged",
        )
    return tensor


def layer_name(layer: int, suffix: str) -> str:
    return f"model.layers.{layer}.{suffix}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the decoder, in the order of the forward pass."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for suffix, shape in _layer_shapes(config).items():
            shapes[layer_name(layer, suffix)] = shape
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, bias in linears:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_weights(source: WeightSource, config: ModelConfig) -> None:
    """Refuse a source that lacks a tensor or has one of another shape, before reading any."""
    found = source.shapes()
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            "model",
            f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0]}",
            "use a complete checkpoint whose config matches its weights",
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                "model",
                f"tensor {name} has shape {list(found[name])}, its config means {list(shape)}",
                "use a checkpoint whose config matches its weights",
            )
