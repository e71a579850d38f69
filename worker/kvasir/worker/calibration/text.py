"""The text that a model is calibrated with, as windows of tokens.

By default the docstrings of Python's standard library: every machine has them, and they are no
part of what `kvasir bench quality` measures on.
"""

import ast
import sysconfig
import warnings
from itertools import takewhile
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvasir.worker.model.errors import ModelError

_ALSO_TOPICS = ("pdb.py",)
"""Files whose docstrings are among the topics that quality is measured on."""
_SHORTEST = 200
"""Characters of a docstring that is taken: shorter ones are no prose."""


def standard_docstrings() -> str:
    """Long docstrings of the standard library's modules, in the order of their files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    taken = (file for file in files if file.name not in _ALSO_TOPICS)
    return "\n\n".join(doc for file in taken for doc in _docstrings(file.read_bytes()))


def read_tokenizer(data: bytes) -> Tokenizer:
    """From tokenizer.json, without what it may say of cutting and padding texts."""
    tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def draw_windows(tokenizer: Tokenizer, text: str, count: int, size: int, seed: int) -> Tensor:
    """Token ids of ``count`` parts of a text that do not overlap, int64 [count, size].

    Each begins with what the tokenizer puts before every text, and with none of what it puts
    behind. ModelError if the text is too short.
    """
    encoded = tokenizer.encode(text)
    marked = list(zip(encoded.ids, encoded.sequence_ids, strict=True))  # None: not of the text
    start = [token for token, _ in takewhile(lambda pair: pair[1] is None, marked)]
    tokens = [token for token, sequence in marked if sequence is not None]
    part = size - len(start)
    if part < 1 or len(tokens) < count * part:
        raise ModelError(
            "text",
            f"its {len(tokens)} tokens are fewer than {count} windows of {size}",
            "give a longer text, or fewer or shorter windows",
        )
    places = Random(seed).sample(range(len(tokens) // part), count)  # noqa: S311 - no secret
    return torch.tensor([start + tokens[place * part : (place + 1) * part] for place in places])


def _docstrings(source: bytes) -> list[str]:
    with warnings.catch_warnings(action="ignore"):  # of old escapes in the library
        tree = ast.parse(source)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [doc for doc in found if doc is not None and len(doc) >= _SHORTEST]
