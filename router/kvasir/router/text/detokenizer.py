"""Output tokens to text, one at a time.

Owns the bytes of a character that is not complete yet. Text that has been given out never
changes; half a character is never given out; the whole equals decoding all tokens at once.
Costs O(1) per token, whatever came before.
"""

import codecs
from collections.abc import Collection, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence of output tokens; tokens in ``skip_ids`` have none."""

    def __init__(self, token_bytes: Sequence[bytes], skip_ids: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._skip_ids = skip_ids
        self._decoder = _new_decoder("replace")

    def feed(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        if token_id in self._skip_ids or token_id >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """The end: U+FFFD if an incomplete character is left, else nothing."""
        return self._decoder.decode(b"", final=True)
