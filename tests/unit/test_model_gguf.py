"""GGUF files written here from tiny models, read back and run against the originals."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.gguf_files import write
from helpers.models import load, reference_greedy, save_tiny
from helpers.tiny_scheduler import TinyScheduler
from kvasir.worker.loader import ModelError
from kvasir.worker.model.gguf_file import GgufReader
from kvasir.worker.model.gguf_types import read_tensor
from kvasir.worker.model.gguf_weights import GgufFile


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_weights_equal_the_originals(tmp_path: Path, kind: str) -> None:
    reference = save_tiny(kind, tmp_path)
    write(tmp_path / "tiny.gguf", tmp_path, reference.config)
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
    extra: dict[str, np.ndarray] = {}
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
    write(path, tmp_path, reference.config)
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
