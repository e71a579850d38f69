"""The served model's tokenizer, built from the files that its workers hand out.

Owns the way from text to token ids and the bytes that each token id stands for. Immutable
after construction and safe to use from several threads. Does no I/O and keeps no state of a
request.

A token's bytes do not depend on its neighbors in the two families that Kvasir serves:
byte-level BPE (GPT-2, Llama 3, Qwen: each character of a token is one byte) and
SentencePiece with byte fallback (Llama 2: U+2581 is a space, ``<0xNN>`` is one byte). So
text can be put together token by token, exactly, and at constant cost per token.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from kvasir.router.text.chat_template import ChatTemplate

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


class TokenizerError(ValueError):
    """The model's tokenizer files cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Text to token ids and back.

    ``token_bytes[id]`` is what the token stands for, special tokens included.
    ``leading_id`` is the beginning-of-sequence token if the model wants prompts to start
    with it, else None.
    ``longest_token`` is the length in bytes of the longest token, or None where encoding
    may normalize or trim the text, so that its length says nothing about its tokens.
    ``lost_bytes`` have no token at all: a vocabulary made from a corpus without them (that
    of SmolLM2, say) drops them.
    """

    core: Tokenizer
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    leading_id: int | None
    eos_id: int | None
    template: ChatTemplate | None
    longest_token: int | None
    lost_bytes: bytes

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "ModelTokenizer":
        """Build from ``tokenizer.json`` and, where the model has them, the other two files.

        Raises:
            TokenizerError: a file is missing, broken or of an unknown kind.
        """
        if _TOKENIZER not in files:
            raise TokenizerError(f"the model's files lack {_TOKENIZER}")
        try:
            description = json.loads(files[_TOKENIZER])
            config = json.loads(files.get(_CONFIG, b"{}"))
            core = Tokenizer.from_buffer(files[_TOKENIZER])
        except Exception as error:  # tokenizers raises no narrower one
            raise TokenizerError(f"the model's tokenizer files are broken: {error}") from error
        # Files may keep what training did to its batches; a prompt is taken as it is.
        core.no_truncation()
        core.no_padding()
        table = _token_bytes(core, description)
        bos, eos = _token_text(config, "bos_token"), _token_text(config, "eos_token")
        bos_id = core.token_to_id(bos) if bos else None
        added = core.get_added_tokens_decoder()
        return cls(
            core=core,
            token_bytes=table,
            special_ids=frozenset(i for i, token in added.items() if token.special),
            leading_id=bos_id if _adds_bos(core, config, bos_id) else None,
            eos_id=core.token_to_id(eos) if eos else None,
            template=_template(files, bos, eos),
            longest_token=max(map(len, table), default=0) if _keeps_text(description) else None,
            lost_bytes=bytes({*range(256)} - {raw[0] for raw in table if len(raw) == 1}),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; the text of a special token is that token.

        With ``add_special_tokens``, a model that wants a beginning-of-sequence token gets
        exactly one, whether or not the text (a rendered chat template, say) has it already.
        """
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self.leading_id is not None and ids[:1] != [self.leading_id]:
            ids.insert(0, self.leading_id)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The whole text of ``token_ids``, special tokens included."""
        return str(self.core.decode(token_ids, skip_special_tokens=False))

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token; empty for ids that pad the model's vocabulary."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``, without encoding it."""
        if not self.longest_token:
            return 0
        kept = text.encode().translate(None, self.lost_bytes)
        return -(-len(kept) // self.longest_token)


def _token_text(config: Mapping[str, Any], key: str) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with ``content``."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _adds_bos(core: Tokenizer, config: Mapping[str, Any], bos_id: int | None) -> bool:
    """What tokenizer_config.json says; else what the post-processor does."""
    if bos_id is None:
        return False
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bool(core.encode("a", add_special_tokens=True).ids[0] == bos_id)


def _template(files: Mapping[str, bytes], bos: str | None, eos: str | None) -> ChatTemplate | None:
    source = files.get(_TEMPLATE)
    if source is None:
        return None
    try:
        return ChatTemplate(source.decode(), bos_token=bos or "", eos_token=eos or "")
    except ValueError as error:
        raise TokenizerError(f"{_TEMPLATE} of the model is broken: {error}") from error


def _keeps_text(description: Mapping[str, Any]) -> bool:
    """Whether the model sees a text as it is, neither normalized nor trimmed."""
    trimming = any(t["lstrip"] or t["rstrip"] for t in description.get("added_tokens", ()))
    return not description.get("normalizer") and not trimming


def _token_bytes(core: Tokenizer, description: Mapping[str, Any]) -> tuple[bytes, ...]:
    kinds = set(_decoder_kinds(description.get("decoder") or {}))
    to_bytes: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif "ByteFallback" in kinds:
        to_bytes = _byte_fallback
    else:
        raise TokenizerError(
            f"{_TOKENIZER} has decoder {sorted(kinds) or 'none'}; "
            "served are byte-level BPE (ByteLevel) and SentencePiece with ByteFallback"
        )
    vocab: dict[str, int] = core.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token)
    for token_id, added in core.get_added_tokens_decoder().items():
        if added.special:
            table[token_id] = added.content.encode()
    return tuple(table)


def _decoder_kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    if "type" in decoder:
        yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte in byte-level BPE (Radford et al., 2019).

    Printable bytes of Latin-1 stand for themselves; the others are numbered from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    """An added token with a character outside of the alphabet is plain text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()
