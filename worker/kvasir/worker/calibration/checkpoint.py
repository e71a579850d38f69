"""Writes a model as a folder in Hugging Face layout, in float32.

float32 because it holds a code times a scale plus a minimum as int4 computes them: another reader
gets the same weights, and rounding them to int4 again changes nothing. A folder appears under its
name when it is complete.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvasir.worker.model.config import ModelConfig, from_hf
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import read_bytes
from kvasir.worker.model.source import ModelSource, locate

SHARD_BYTES = 2 << 30
"""A file of weights is complete with the tensor that makes it this large."""
_DESCRIPTIVE = frozenset(
    ["", ".jinja", ".json", ".md", ".model", ".pdf", ".py", ".tiktoken", ".txt"]
)
"""Suffixes of the files that come along: any other may hold weights, in one of many formats."""
_INDEX = ".index."
"""In the name of a file that says where weights are."""
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``output`` at the end; nothing is left of a failure.

    ModelError if there is something already, or no place for it.
    """
    if os.path.lexists(output):  # also a link to nothing, which would be replaced
        raise ModelError("output", f"{output} exists", "remove it, or give another folder")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.absolute().parent))
    except OSError as error:
        raise ModelError(
            "output", f"{output} cannot be made ({error.strerror})", "give another folder"
        ) from error
    try:
        folder.chmod(0o755)
        yield folder
        with _writing():
            folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # there is none after success


def write_description(folder: Path, url: str, source: ModelSource) -> None:
    """All but the weights: those files of a given folder, or what a GGUF file says."""
    path = locate(url)
    config = _describe(folder, path, source)
    config["dtype"] = "float32"
    text = json.dumps(config, indent=2) + "\n"
    with _writing():
        (folder / "config.json").write_text(text, encoding="utf-8")


def _describe(folder: Path, path: Path, source: ModelSource) -> dict[str, Any]:
    """Write all but config.json, which is returned without a dtype."""
    if path.is_dir():
        for file in path.iterdir():
            if file.is_file() and file.suffix in _DESCRIPTIVE and _INDEX not in file.name:
                content = read_bytes(file)
                with _writing():
                    (folder / file.name).write_bytes(content)
        config: dict[str, Any] = json.loads(read_bytes(path / "config.json"))
        config.pop("torch_dtype", None)
        return config
    for name, content in source.tokenizer_files.items():
        with _writing():
            (folder / name).write_bytes(content)
    return _config_json(source.config, source.eos_token_ids)


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Shards with an index; no more than one shard is in memory."""
    file_of: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        with _writing():
            save_file(shard, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(0o644)  # like the rest; the library keeps it to its owner
        file_of.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
        if sum(kept.nbytes for kept in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    with _writing():
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _writing() -> Iterator[None]:
    """What the system refuses, such as more than the disk holds, is a ModelError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            "output", f"cannot be written ({error})", "make room there, or give another folder"
        ) from error


def _config_json(config: ModelConfig, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """config.json of a model that came without one."""
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "eos_token_id": sorted(eos_token_ids),
    }
    said = from_hf(raw)
    if said != config:
        differing = [key for key, value in asdict(config).items() if value != asdict(said)[key]]
        raise ModelError(
            "model",
            f"config.json cannot say its {', '.join(differing)}",
            "give the model's Hugging Face folder instead of its GGUF file",
        )
    return raw
