"""The files with which a router speaks a model: tokenizer, chat template, special tokens.

All are in the format of Hugging Face: ``tokenizer.json`` as the ``tokenizers`` library
loads it, ``chat_template.jinja`` (absent if the model has none) and
``tokenizer_config.json``, of which ``bos_token``, ``eos_token`` (text or null) and
``add_bos_token`` are always there. ``add_bos_token`` says what ``tokenizer.json`` itself
does when it encodes with special tokens, so that nobody adds a second one.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import Fields, read_bytes, read_object, read_text

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"

_CONTROL = 3
_USER_DEFINED = 4

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_BYTES_ONLY = {**_BYTE_LEVEL, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How each ``tokenizer.ggml.pre`` cuts text before merging.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "llama-bpe": [_split(_WORDS % r"\p{N}{1,3}"), _BYTES_ONLY],
    "qwen2": [_split(_WORDS % r"\p{N}"), _BYTES_ONLY],
}


def from_folder(folder: Path) -> dict[str, bytes]:
    """The tokenizer files of a folder in Hugging Face layout."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelError(
            str(folder), f"has no {TOKENIZER}", "save the model with its fast tokenizer"
        )
    data = read_bytes(path)
    tokenizer = _checked(data, str(path))
    described = folder / CONFIG
    fields = Fields(read_object(described) if described.is_file() else {}, CONFIG)
    bos, eos = _special(fields, "bos_token"), _special(fields, "eos_token")
    first = tokenizer.encode("").ids[:1]
    adds_bos = bos is not None and first == [tokenizer.token_to_id(bos)]
    config = {**fields.raw, "bos_token": bos, "eos_token": eos, "add_bos_token": adds_bos}
    return _files(data, config, _folder_template(folder, fields))


def from_gguf(fields: Fields) -> dict[str, bytes]:
    """The tokenizer files that GGUF metadata (``tokenizer.*`` keys) describes."""
    kind, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            "model",
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported",
            f"use one of gpt2 with {', '.join(_PRE_TOKENIZERS)}, or a Hugging Face folder",
        )
    tokens = fields.texts("tokenizer.ggml.tokens")
    bos = _token_at(tokens, fields, "bos")
    add_bos = fields.flag("tokenizer.ggml.add_bos_token") and bos is not None
    config = {
        "bos_token": bos,
        "eos_token": _token_at(tokens, fields, "eos"),
        "pad_token": _token_at(tokens, fields, "padding"),
        "add_bos_token": add_bos,
    }
    tokenizer = _tokenizer_json(fields, tokens, pre, bos if add_bos else None)
    data = json.dumps(tokenizer, ensure_ascii=False).encode()
    _checked(data, fields.file)
    return _files(data, config, fields.text("tokenizer.chat_template") or None)


def _files(tokenizer: bytes, config: Mapping[str, Any], template: str | None) -> dict[str, bytes]:
    files = {TOKENIZER: tokenizer, CONFIG: json.dumps(config).encode()}
    return files if template is None else {**files, TEMPLATE: template.encode()}


def _tokenizer_json(
    fields: Fields, tokens: Sequence[str], pre: str, bos: str | None
) -> dict[str, Any]:
    kinds = fields.whole_numbers("tokenizer.ggml.token_type")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None if bos is None else _prepend(bos, tokens.index(bos)),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields.texts("tokenizer.ggml.merges")],
        },
    }


def _prepend(bos: str, bos_id: int) -> dict[str, Any]:
    """Post-processor that puts ``bos`` before every encoding with special tokens."""
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _token_at(tokens: Sequence[str], fields: Fields, name: str) -> str | None:
    """The text of the special token of this name; None if there is none."""
    found = fields.whole_numbers(f"tokenizer.ggml.{name}_token_id")
    return next((tokens[index] for index in found if 0 <= index < len(tokens)), None)


def _checked(data: bytes, name: str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(
            name, f"not a tokenizer that can be loaded ({error})", "save it again"
        ) from error


def _special(fields: Fields, key: str) -> str | None:
    """A special token's text; older configs wrap it in an object."""
    if isinstance(fields.raw.get(key), dict):
        return fields.section(key).text("content")
    return fields.text(key)


def _folder_template(folder: Path, fields: Fields) -> str | None:
    path = folder / TEMPLATE
    if path.is_file():
        return read_text(path)
    templates = fields.raw.get("chat_template")
    if not isinstance(templates, list):
        return fields.text("chat_template")
    named = (entry for entry in templates if isinstance(entry, dict))
    default = next((entry for entry in named if entry.get("name") == "default"), {})
    return Fields(default, CONFIG, "chat_template.").text("template")
