"""Text put together token by token equals the tokenizers library's decoding of the whole."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from helpers.bundled_tokenizer import IM_END, VOCAB_SIZE, tokenizer
from kvasir.router.text.detokenizer import Detokenizer
from kvasir.router.text.tokenizer import ModelTokenizer, TokenizerError

_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)
_LOST = {*range(256)} - {raw[0] for raw in tokenizer().token_bytes if len(raw) == 1}
"""Bytes for which this model has no token: its tokenizer drops them."""


def _pieces(ids: list[int], skip: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(tokenizer().token_bytes, skip)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@given(_ANY_TEXT)
@settings(deadline=None)
def test_any_text_comes_back(text: str) -> None:
    text = "".join(c for c in text if not _LOST & {*c.encode()})
    ids = tokenizer().encode(text)
    assert "".join(_pieces(ids)) == text
    assert tokenizer().decode(ids) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
@settings(deadline=None)
def test_any_tokens_give_what_decoding_the_whole_gives(ids: list[int]) -> None:
    special = tokenizer().special_ids
    whole = tokenizer().core.decode(ids, skip_special_tokens=True)
    assert "".join(_pieces(ids, special)) == whole


def test_bytes_that_are_no_utf8_decode_alike() -> None:
    byte_ids = [i for i, raw in enumerate(tokenizer().token_bytes) if len(raw) == 1]
    assert len(byte_ids) == 256 - len(_LOST)
    rng = random.Random(1)
    for _ in range(300):
        ids = rng.choices(byte_ids, k=12)
        assert "".join(_pieces(ids)) == tokenizer().core.decode(ids)


def test_half_a_character_is_held_back() -> None:
    text = "a☃😀b"
    ids = tokenizer().encode(text)
    assert len(ids) > len(text)
    shown = ""
    for piece in _pieces(ids):
        shown += piece
        assert text.startswith(shown)
        assert "\ufffd" not in shown


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    ids = tokenizer().encode("😀")
    assert _pieces(ids[:-1]) == [""] * (len(ids) - 1) + ["\ufffd"]


def test_special_and_unknown_tokens_have_no_text() -> None:
    ids = [*tokenizer().encode("a"), IM_END, VOCAB_SIZE + 5, *tokenizer().encode("b")]
    assert "".join(_pieces(ids, tokenizer().special_ids)) == "ab"
    assert tokenizer().bytes_of(IM_END) == b"<|im_end|>"


@given(_ANY_TEXT)
@settings(deadline=None)
def test_fewest_tokens_is_a_lower_bound(text: str) -> None:
    assert tokenizer().fewest_tokens(text) <= len(tokenizer().encode(text))


def test_fewest_tokens_at_the_extremes() -> None:
    longest = max(tokenizer().token_bytes, key=len).decode()
    assert tokenizer().fewest_tokens(longest) == len(tokenizer().encode(longest)) == 1
    assert tokenizer().fewest_tokens("\U00040000" * 9) <= len(tokenizer().encode("\U00040000" * 9))
    assert tokenizer().fewest_tokens("x" * 1_000_000) > 10_000


def _sentencepiece(vocab: list[str]) -> Tokenizer:
    core = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return core


def test_byte_fallback_tokens_are_bytes() -> None:
    core = _sentencepiece(["▁", "▁hi", "<0xE2>", "<0x98>", "<0x83>", "é"])
    built = ModelTokenizer.from_files({"tokenizer.json": core.to_str().encode()})
    ids = [1, 0, 2, 3, 4, 5]
    detokenizer = Detokenizer(built.token_bytes, ())
    pieces = [detokenizer.feed(i) for i in ids]
    assert pieces == [" hi", " ", "", "", "☃", "é"]
    assert "".join(pieces) == core.decode(ids)


def test_no_prompt_is_cut_or_padded_as_in_training() -> None:
    core = _sentencepiece(["a", "b"])
    core.enable_truncation(4)
    core.enable_padding(length=6, pad_id=1)
    built = ModelTokenizer.from_files({"tokenizer.json": core.to_str().encode()})
    assert built.core.encode("a" * 9).ids == [0] * 9
    assert built.core.encode("a").ids == [0]


def test_an_unknown_decoder_is_refused() -> None:
    core = _sentencepiece(["a"])
    core.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        ModelTokenizer.from_files({"tokenizer.json": core.to_str().encode()})


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer.json": b"{"}, {"tokenizer.json": b'{"model": 1}'}]
)
def test_broken_files_are_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer"):
        ModelTokenizer.from_files(files)
