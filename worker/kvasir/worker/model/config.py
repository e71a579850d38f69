"""Shape and constants of a Llama-family decoder, and how ``config.json`` says them.

Llama, Mistral, Qwen2 and Qwen3 differ only in fields of ``ModelConfig``; nothing else in
the worker asks which one it runs. What a config asks for and the decoder cannot do is an
error here, never a silent approximation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.worker.model.errors import ModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


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


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a ``config.json`` in the layout of Hugging Face, of any transformers version."""
    model_type = str(raw.get("model_type"))
    if model_type not in MODEL_TYPES:
        raise ModelError(
            "config.json",
            f"model_type {model_type!r} is not supported",
            f"use one of {', '.join(MODEL_TYPES)}",
        )
    hidden_act = raw.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise _unsupported("hidden_act", hidden_act, "silu")
    num_heads = _count(raw, "num_attention_heads")
    hidden_size = _count(raw, "hidden_size")
    theta, scaling = _rope(raw)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        model_type=model_type,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(raw, "num_key_value_heads", num_heads),
        head_dim=_count(raw, "head_dim", hidden_size // num_heads),
        context=_context(raw, model_type),
        rms_norm_eps=_real(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        llama3_scaling=scaling,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=model_type in ("llama", "qwen3") and attention_bias,
        mlp_bias=model_type == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling; newer configs keep both under ``rope_parameters``."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    rotary = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if rotary != 1.0:
        raise _unsupported("partial_rotary_factor", rotary, "1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _unsupported("rope_type", kind, "default or llama3")
    original = rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    if original is None:
        raise _missing("original_max_position_embeddings")
    return theta, Llama3Scaling(
        factor=_real(rope, "factor"),
        low_freq_factor=_real(rope, "low_freq_factor"),
        high_freq_factor=_real(rope, "high_freq_factor"),
        original_context=int(original),
    )


def _context(raw: Mapping[str, Any], model_type: str) -> int:
    """Positions the decoder serves exactly.

    Within a sliding window full attention is the same thing; beyond it, it is not, so the
    window bounds the context.
    """
    context = _count(raw, "max_position_embeddings")
    windowed = model_type == "mistral" or bool(raw.get("use_sliding_window", False))
    return min(context, _count(raw, "sliding_window", context)) if windowed else context


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise _missing(key)
    return raw[key]


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; ``default``, if given, stands for null and 0 too."""
    value = _required(raw, key) if default is None else raw.get(key) or default
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if count < 1:
        raise _unsupported(key, value, "that is a whole number above 0")
    return count


def _real(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _required(raw, key) if default is None else raw.get(key, default)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unsupported(key, value, "that is a number") from error


def _missing(key: str) -> ModelError:
    return ModelError("config.json", f"{key} is missing", "use the model's complete config.json")


def _unsupported(key: str, value: object, supported: str) -> ModelError:
    return ModelError(
        "config.json", f"{key} {value!r} is not supported", f"use a model with {key} {supported}"
    )
