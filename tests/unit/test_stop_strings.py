"""Stop strings against a reference that looks at the whole text, one character more each time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.router.text.stop_strings import StopStrings

_ALPHABET = "ab "
_TEXTS = st.text(_ALPHABET, max_size=40)
_STOPS = st.lists(st.text(_ALPHABET, min_size=1, max_size=6), max_size=4)


def _reference(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def _fed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += watcher.feed(piece)
        if watcher.matched:
            return shown, True
    return shown + watcher.flush(), False


@st.composite
def _cut_text(draw: st.DrawFn) -> list[str]:
    text = draw(_TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(_cut_text(), _STOPS)
@settings(max_examples=1000, deadline=None)
def test_equals_the_reference_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    assert _fed(pieces, stops) == _reference("".join(pieces), stops)


@given(_TEXTS, _STOPS)
@settings(max_examples=500, deadline=None)
def test_holds_back_no_more_than_could_still_match(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += watcher.feed(character)
        if watcher.matched:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_before_a_match_inside_a_piece_is_kept_and_nothing_after() -> None:
    watcher = StopStrings(["STOP"])
    assert watcher.feed("one ST") == "one "
    assert watcher.feed("OP two") == ""
    assert watcher.matched


def test_a_false_start_is_released() -> None:
    watcher = StopStrings(["\n\nQ"])
    assert watcher.feed("a\n") == "a"
    assert watcher.feed("\n") == ""
    assert watcher.feed("b") == "\n\nb"
    assert not watcher.matched
    assert watcher.flush() == ""
