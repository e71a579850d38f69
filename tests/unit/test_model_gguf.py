"""GGUF files written here from tiny models, read back and run against the originals."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.models import TINY_VOCAB, load, reference_greedy, save_tiny
from helpers.tiny_scheduler import TinyScheduler
from kvasir.worker.loader import ModelError
from kvasir.worker.model.gguf_file import GgufReader
from kvasir.worker.model.gguf_types import read_tensor
from kvasir.worker.model.gguf_weights import GgufFile

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


def write(path: Path, folder: Path, config: Any, extra: dict[str, np.ndarray]) -> None:
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_weights_equal_the_originals(tmp_path: Path, kind: str) -> None:
    reference = save_tiny(kind, tmp_path)
    write(tmp_path / "tiny.gguf", tmp_path, reference.config, {})
    file = GgufFile(tmp_path / "tiny.gguf")
    originals = load_file(tmp_path / "model.safetensors")
    assert set(file.shapes()) == set(originals)
    for name, original in originals.items():
        assert file.shapes()[name] == tuple(original.shape)
        assert torch.equal(file.read(name), original), name


@pytest.mark.parametrize("kind", ["llama3-rope", "qwen3"])
def test_tokens_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """GGUF states Llama 3's stretched frequencies as a tensor of divisors."""
    reference = save_tiny(kind, tmp_path)
    extra = {}
    if kind == "llama3-rope":
        pairs = reference.config.head_dim // 2
        plain = 1.0 / 5000.0 ** (torch.arange(pairs) / pairs)
        divisors = plain / reference.model.rotary_emb.inv_freq
        assert divisors.max() > 1.5
        extra["rope_freqs.weight"] = divisors.numpy()
    write(tmp_path / "tiny.gguf", tmp_path, reference.config, extra)
    loaded = load(f"file://{tmp_path}/tiny.gguf")
    scheduler = TinyScheduler(loaded.runner, block_size=16)
    prompt = list(range(10, 110))
    sequence = scheduler.add(prompt, room=10)
    scheduler.run(32, max_output=10)
    assert sequence.output == reference_greedy(reference, prompt, 10)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_values_equal_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    """Bit by bit: the types decoded here, and one that is left to the package."""
    random = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
    quantization = gguf.GGMLQuantizationType[kind]
    stored = gguf.quantize(random, quantization)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_string("first", "a key of another length than the next one")
    writer.add_array("second", [1.5, -2.0])
    writer.add_tensor("t", stored, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GgufReader(tmp_path / "one.gguf")
    assert reader.metadata["first"] == "a key of another length than the next one"
    assert reader.metadata["second"] == [1.5, -2.0]
    assert reader.tensors["t"].shape == (6, 64)
    found = read_tensor(reader, reader.tensors["t"]).float().numpy()
    assert np.array_equal(found, gguf.dequantize(stored, quantization))


def test_a_file_of_another_kind_or_cut_short_is_refused(tmp_path: Path) -> None:
    reference = save_tiny("llama", tmp_path)
    path = tmp_path / "tiny.gguf"
    write(path, tmp_path, reference.config, {})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        GgufFile(path)
    for size in (0, 3, 10, 40, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            GgufFile(path)
    path.write_bytes(whole.replace(b"llama", b"gemma"))
    with pytest.raises(ModelError, match="unsupported architecture 'gemma'"):
        GgufFile(path)
