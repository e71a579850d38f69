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
    data = path.read_bytes()
    tokenizer = _checked(data, str(path))
    raw = _read_config(folder / CONFIG)
    config = {**raw, "bos_token": _text(raw, "bos_token"), "eos_token": _text(raw, "eos_token")}
    first = tokenizer.encode("").ids[:1]
    bos = config["bos_token"]
    config["add_bos_token"] = bos is not None and first == [tokenizer.token_to_id(bos)]
    files = {TOKENIZER: data, CONFIG: json.dumps(config).encode()}
    template = _folder_template(folder, raw)
    if template is not None:
        files[TEMPLATE] = template
    return files


def from_gguf(value: Mapping[str, Any]) -> dict[str, bytes]:
    """The tokenizer files that GGUF metadata (``tokenizer.*`` keys) describes."""
    kind, pre = value.get("tokenizer.ggml.model"), value.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            "model",
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported",
            f"use one of gpt2 with {', '.join(_PRE_TOKENIZERS)}, or a Hugging Face folder",
        )
    tokens: Sequence[str] = value["tokenizer.ggml.tokens"]
    bos = _token_at(tokens, value.get("tokenizer.ggml.bos_token_id"))
    add_bos = bool(value.get("tokenizer.ggml.add_bos_token", False)) and bos is not None
    config = {
        "bos_token": bos,
        "eos_token": _token_at(tokens, value.get("tokenizer.ggml.eos_token_id")),
        "pad_token": _token_at(tokens, value.get("tokenizer.ggml.padding_token_id")),
        "add_bos_token": add_bos,
    }
    tokenizer = _tokenizer_json(value, pre, bos if add_bos else None)
    data = json.dumps(tokenizer, ensure_ascii=False).encode()
    _checked(data, TOKENIZER)
    files = {TOKENIZER: data, CONFIG: json.dumps(config).encode()}
    template = value.get("tokenizer.chat_template")
    if template:
        files[TEMPLATE] = template.encode()
    return files


def _tokenizer_json(value: Mapping[str, Any], pre: str, bos: str | None) -> dict[str, Any]:
    tokens: Sequence[str] = value["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = value.get("tokenizer.ggml.token_type", [])
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(kinds)
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
            "merges": [merge.split(" ") for merge in value["tokenizer.ggml.merges"]],
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


def _token_at(tokens: Sequence[str], index: int | None) -> str | None:
    return tokens[index] if index is not None and index < len(tokens) else None


def _checked(data: bytes, name: str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(
            name, f"not a tokenizer that can be loaded ({error})", "save it again"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(str(path), f"not valid JSON ({error})", "download it again") from error
    if not isinstance(raw, dict):
        raise ModelError(str(path), "not a JSON object", "download it again")
    return raw


def _text(raw: Mapping[str, Any], key: str) -> str | None:
    """A special token's text; older configs wrap it in an object."""
    token = raw.get(key)
    return token.get("content") if isinstance(token, dict) else token


def _folder_template(folder: Path, raw: Mapping[str, Any]) -> bytes | None:
    path = folder / TEMPLATE
    if path.is_file():
        return path.read_bytes()
    template = raw.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return None if template is None else str(template).encode()
