"""Prompt lookup: what followed the last few tokens when they stood earlier in the sequence.

Saxena, "Prompt Lookup Decoding", 2023. Text that is edited, summarized or continued repeats
itself. Pure; an index grows with its sequence and never looks at it as a whole again.
"""

from collections.abc import Iterable

MIN_MATCH = 2
"""Tokens that must be equal: after a single one nearly anything can follow."""
MAX_MATCH = 8
"""Beyond this, a longer match says no more."""
MAX_CANDIDATES = 8
"""Earlier places that are compared, the latest ones: bounds the work in monotonous text."""


class NgramIndex:
    """The tokens of one sequence, and where each run of MIN_MATCH of them last stood."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """By MIN_MATCH tokens: the position that follows their latest occurrence. Those that
        end the sequence are not in it yet: nothing follows them."""
        self._earlier: list[int] = []
        """By position: that of the occurrence before; 0 for none."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the sequence."""
        tokens, latest, earlier = self._tokens, self._latest, self._earlier
        for token_id in token_ids:
            position = len(tokens)
            place = 0
            if position >= MIN_MATCH:
                key = tuple(tokens[position - MIN_MATCH :])
                place = latest.get(key, 0)
                latest[key] = position
            earlier.append(place)
            tokens.append(token_id)

    def propose(self, count: int) -> tuple[int, ...]:
        """``count`` tokens that may come next; none if the last ones are new.

        They follow the place that agrees with the end of the sequence the longest, among
        the latest MAX_CANDIDATES; the latest of equals. Where that place is so near the end that
        it runs into it, the sequence is taken to repeat with that period.
        """
        place = self._best_place()
        if not place:
            return ()
        drafts = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return tuple(drafts)

    def _best_place(self) -> int:
        if len(self._tokens) < MIN_MATCH:
            return 0
        place = self._latest.get(tuple(self._tokens[-MIN_MATCH:]), 0)
        best, longest = 0, 0
        for _ in range(MAX_CANDIDATES):
            if not place or longest == MAX_MATCH:
                break
            length = self._agreement(place)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        return best

    def _agreement(self, place: int) -> int:
        """How many tokens before ``place`` equal the sequence's last ones, up to MAX_MATCH."""
        tokens, end = self._tokens, len(self._tokens)
        length = MIN_MATCH
        while (
            length < min(MAX_MATCH, place)
            and tokens[place - 1 - length] == tokens[end - 1 - length]
        ):
            length += 1
        return length
