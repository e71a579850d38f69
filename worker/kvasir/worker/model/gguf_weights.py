"""Config and weights of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Quantized tensors are dequantized as they are read. Files of architecture ``llama`` hold the
rows of Q and K in another order: rotary partners side by side instead of half a head apart.
``read`` restores the order of Hugging Face checkpoints, so that the decoder knows one only.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvasir.worker.model.config import MODEL_TYPES, ModelConfig
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import Fields
from kvasir.worker.model.fingerprint import Span, WeightFile
from kvasir.worker.model.gguf_file import GgufError, GgufReader
from kvasir.worker.model.gguf_types import UnsupportedTypeError, read_tensor, stored_size
from kvasir.worker.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD, finite, layer_name

_GLOBAL_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """One GGUF file: its metadata by key, its config, and a WeightSource over its tensors."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GgufReader(path)
            sizes = {t.name: stored_size(t) for t in self._reader.tensors.values()}
            for tensor in self._reader.tensors.values():
                self._reader.bytes_at(tensor, sizes[tensor.name])
        except (GgufError, OSError) as error:
            raise ModelError(
                "model", f"{path} is not a readable GGUF file ({error})", "download it again"
            ) from error
        self.path = path
        self.metadata = self._reader.metadata
        self._tensors = self._reader.tensors
        self._sizes = sizes
        hf_names = {_hf_name(name): name for name in self._tensors}
        self._gguf_names = {hf: name for hf, name in hf_names.items() if hf is not None}
        self.config = self._config()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: self._tensors[gguf_name].shape for name, gguf_name in self._gguf_names.items()
        }

    @property
    def file(self) -> WeightFile:
        spans = (Span(t.offset, self._sizes[t.name]) for t in self._tensors.values())
        return WeightFile(self.path, tuple(spans))

    def read(self, name: str) -> torch.Tensor:
        tensor = self._dequantized(self._gguf_names[name])
        if self.config.model_type != "llama":
            return tensor
        if ".q_proj." in name:
            return _halves_apart(tensor, self.config.num_heads)
        if ".k_proj." in name:
            return _halves_apart(tensor, self.config.num_kv_heads)
        return tensor

    def _dequantized(self, gguf_name: str) -> torch.Tensor:
        try:
            return read_tensor(self._reader, self._tensors[gguf_name])
        except UnsupportedTypeError as error:
            raise ModelError(
                "model",
                f"{self.path.name} has tensors of the unsupported type {error}",
                "use another quantization of the model",
            ) from error

    def _config(self) -> ModelConfig:
        architecture = self.metadata.get("general.architecture")
        if architecture not in MODEL_TYPES or self.metadata.get(f"{architecture}.expert_count"):
            raise ModelError(
                "model",
                f"{self.path.name} has the unsupported architecture {architecture!r}",
                f"use a dense model of type {', '.join(MODEL_TYPES)}",
            )
        fields = _fields_of(architecture, self.metadata, self.path.name)
        if fields.text("rope.scaling.type") not in (None, "none"):
            raise fields.unsupported("rope.scaling.type", "none")
        hidden = fields.count("embedding_length")
        heads = fields.count("attention.head_count")
        rotated = fields.count("rope.dimension_count", hidden // heads, least=0)
        head_dim = fields.count("attention.key_length", rotated, least=0)
        context = fields.count("context_length")
        window = fields.count("attention.sliding_window", 0, least=0)
        first_layer = {name.removeprefix("blk.0.") for name in self._tensors}
        return ModelConfig(
            model_type=architecture,
            vocab_size=self._vocabulary(),
            hidden_size=hidden,
            intermediate_size=fields.count("feed_forward_length"),
            num_layers=fields.count("block_count"),
            num_heads=heads,
            num_kv_heads=fields.count("attention.head_count_kv", heads),
            head_dim=head_dim,
            context=min(context, window or context),
            rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.real("rope.freq_base", 10000.0, least=1.0),
            rope_divisors=self._rope_divisors(head_dim),
            tied_embeddings="output.weight" not in self._tensors,
            qkv_bias="attn_q.bias" in first_layer,
            output_bias="attn_output.bias" in first_layer,
            mlp_bias="ffn_down.bias" in first_layer,
            qk_norm="attn_q_norm.weight" in first_layer,
        )

    def _vocabulary(self) -> int:
        """How many tokens the embedding has."""
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or not embedding.shape[0]:
            raise ModelError(
                "model", f"{self.path.name} has no token embedding", "use a complete GGUF file"
            )
        return embedding.shape[0]

    def _rope_divisors(self, head_dim: int) -> tuple[float, ...] | None:
        tensor = self._tensors.get(_ROPE_DIVISORS)
        if tensor is None:
            return None
        if not head_dim // 2 or tensor.shape != (head_dim // 2,):
            raise ModelError(
                "model",
                f"tensor {tensor.name} of {self.path.name} has shape {list(tensor.shape)}, its "
                f"config means [{head_dim // 2}]",
                "use a checkpoint whose config matches its weights",
            )
        return tuple(finite(self._dequantized(tensor.name), tensor.name).tolist())


def _fields_of(architecture: str, metadata: Mapping[str, Any], file: str) -> Fields:
    """The metadata under the architecture's name, by what comes after that."""
    place = f"{architecture}."
    own = {
        key.removeprefix(place): value for key, value in metadata.items() if key.startswith(place)
    }
    return Fields(own, file, place)


def _hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one the decoder has no use for."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_PATTERN.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return layer_name(int(match[1]), f"{_LAYER_NAMES[match[2]]}.{match[3]}")


def _halves_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Move rotary partners (2i, 2i + 1) of each head to (i, i + head_dim / 2)."""
    paired = rows.view(heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
