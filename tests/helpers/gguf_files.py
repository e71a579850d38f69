"""GGUF files written from tiny folders in Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from helpers.models import TINY_VOCAB

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: rotary partners next to each other."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.asarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write(
    path: Path,
    folder: Path,
    config: Any,
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A tiny folder as a GGUF file, with ``extra`` tensors and ``changed`` metadata.

    A value of None takes its key away.
    """
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = [chr(0x100 + index) for index in range(TINY_VOCAB)]
    alphabet[2] = alphabet[0] + alphabet[1]
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * TINY_VOCAB)
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = side_by_side(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = side_by_side(values, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in extra.items():
        writer.add_tensor(name, values)
    for key, value in changed.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
