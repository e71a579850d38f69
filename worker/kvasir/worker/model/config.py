"""Shape and constants of a Llama-family decoder, and how ``config.json`` says them.

Llama, Mistral, Qwen2 and Qwen3 differ only in fields of ``ModelConfig``; nothing else in
the worker asks which one it runs. What a config asks for and the decoder cannot do is an
error here, never a silent approximation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import Fields

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MOST_LAYERS = 10_000
"""More are a damaged config: to list their tensors would take more than this memory."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretched rotary frequencies of Llama 3.1 (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder.

    ``context`` is the longest sequence in tokens. ``rope_divisors``, if given, divide the
    ``head_dim // 2`` rotary frequencies (GGUF states any scaling so).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rms_norm_eps: float
    rope_theta: float
    llama3_scaling: Llama3Scaling | None = None
    rope_divisors: tuple[float, ...] | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ModelError(
                "model",
                f"architecture {self.model_type!r} is not supported",
                f"use one of {', '.join(MODEL_TYPES)}",
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                "model",
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads",
                "check the model's config",
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(
                "model",
                f"head_dim {self.head_dim} cannot be rotated in pairs",
                "check the model's config",
            )
        if self.rope_divisors is not None and not all(each > 0 for each in self.rope_divisors):
            raise ModelError("model", "a rotary divisor is not above 0", "check the model's file")
        if self.num_layers > _MOST_LAYERS:
            raise ModelError(
                "model",
                f"{self.num_layers} layers are more than {_MOST_LAYERS}",
                "check the model's config",
            )


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json`` in the layout of Hugging Face, of any transformers version."""
    fields = Fields(raw, "config.json")
    model_type = fields.text("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            "config.json",
            f"model_type {model_type!r} is not supported",
            f"use one of {', '.join(MODEL_TYPES)}",
        )
    if fields.text("hidden_act") not in (None, "silu"):
        raise fields.unsupported("hidden_act", "silu")
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    theta, scaling = _rope(fields)
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        model_type=model_type,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", hidden_size // num_heads, least=0),
        context=_context(fields, model_type),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        llama3_scaling=scaling,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=model_type in ("llama", "qwen3") and attention_bias,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias"),
        qk_norm=model_type == "qwen3",
    )


def _rope(fields: Fields) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling; newer configs keep both under ``rope_parameters``."""
    newer = fields.section("rope_parameters")
    rope = newer if newer.raw else fields.section("rope_scaling")
    theta = rope.real("rope_theta", fields.real("rope_theta", 10000.0, least=1.0), least=1.0)
    for place in (rope, fields):
        if place.real("partial_rotary_factor", 1.0) != 1.0:
            raise place.unsupported("partial_rotary_factor", "1.0")
    key = "type" if rope.raw.get("rope_type") is None else "rope_type"
    kind = rope.text(key)
    if kind in (None, "default"):
        return theta, None
    if kind != "llama3":
        raise rope.unsupported(key, "default or llama3")
    scaling = Llama3Scaling(
        factor=rope.real("factor", least=1.0),
        low_freq_factor=rope.real("low_freq_factor"),
        high_freq_factor=rope.real("high_freq_factor"),
        original_context=rope.count(
            "original_max_position_embeddings", fields.count("max_position_embeddings")
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.unsupported("high_freq_factor", "above its low_freq_factor")
    return theta, scaling


def _context(fields: Fields, model_type: str) -> int:
    """Positions the decoder serves exactly.

    Within a sliding window full attention is the same thing; beyond it, it is not, so the
    window bounds the context. A window of 0 is none.
    """
    context = fields.count("max_position_embeddings")
    if model_type != "mistral" and not fields.flag("use_sliding_window"):
        return context
    return min(context, fields.count("sliding_window", 0, least=0) or context)
