"""One choice of an answer: output tokens in, shown text out. Pure; does no I/O.

Owns what is between a worker's tokens and a client's text: characters that are not complete,
text in which a stop string may begin, counts, and the reason for the end. Works token by
token, so how a worker batches its tokens changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from kvasir.proto.sampling import SamplingParams, TokenLogprobs
from kvasir.router.api.responses import FinishReason
from kvasir.router.contracts import Finished, TokenEvent
from kvasir.router.contracts import FinishReason as Finish
from kvasir.router.text.detokenizer import Detokenizer
from kvasir.router.text.stop_strings import StopStrings
from kvasir.router.text.tokenizer import ModelTokenizer

_REASONS: Final[dict[Finish, FinishReason]] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its logprobs (None: the prompt's first, which follows nothing).

    ``offset`` is where its text begins, in characters of the choice's text.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to choice ``index``; ``finish_reason`` on the last one only."""

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, to be shown before the answer."""

    text: str
    prompt_ids: Sequence[int]


class Choice:
    """Follows one generation. ``finish_reason`` is set once nothing more will be shown."""

    def __init__(
        self,
        index: int,
        tokenizer: ModelTokenizer,
        sampling: SamplingParams,
        stops: Sequence[str],
        echo: Echo | None = None,
    ) -> None:
        self.index = index
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.decode_worker = ""
        self.prefill_worker: str | None = None
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._scored = sampling.logprobs is not None
        self._min_tokens = sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer.token_bytes, _unshown(tokenizer, sampling))
        self._stops = StopStrings(stops)
        self._echo = echo
        self._length = 0

    def feed(self, event: TokenEvent) -> Delta:
        """Take new tokens. After a stop string sets ``finish_reason``, feed no more."""
        self._learn_who_served(event)
        texts: list[str] = []
        tokens: list[ScoredToken] = []
        if self._echo is not None:
            texts.append(self._echo.text)
            if self._scored:
                tokens += self._prompt_tokens(self._echo, event)
            self._echo = None
        for position, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            if self._scored:
                tokens.append(ScoredToken(token_id, event.logprobs[position], self._length))
            texts.append(self._shown(self._detokenizer.feed(token_id)))
            if self._stops.matched:
                self.finish_reason = "stop"
                break
        return Delta(self.index, "".join(texts), tuple(tokens), self.finish_reason)

    def finish(self, event: Finished) -> Delta:
        """The generation ended by itself: release what was held back."""
        text = self._shown(self._detokenizer.flush())
        self.finish_reason = "stop" if self._stops.matched else _REASONS[event.reason]
        return Delta(self.index, text + self._stops.flush(), (), self.finish_reason)

    def _learn_who_served(self, event: TokenEvent) -> None:
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.decode_worker:
            self.decode_worker = event.decode_worker
            self.prefill_worker = event.prefill_worker

    def _shown(self, text: str) -> str:
        self._length += len(text)
        if self.completion_tokens < self._min_tokens:
            return text
        return self._stops.feed(text)

    def _prompt_tokens(self, echo: Echo, event: TokenEvent) -> list[ScoredToken]:
        """Prompt tokens with logprobs, none if they were not asked for.

        What the tokens have more than the text is at its start and takes no room: a
        beginning-of-sequence token, or SentencePiece's space.
        """
        self._length = len(echo.text)
        whole = Detokenizer(self._tokenizer.token_bytes, ())
        ends = list(accumulate(len(whole.feed(token_id)) for token_id in echo.prompt_ids))
        surplus = ends[-1] + len(whole.flush()) - len(echo.text)
        starts = (max(0, end - surplus) for end in [0, *ends])
        return [
            ScoredToken(token_id, score, start)
            for token_id, score, start in zip(
                echo.prompt_ids, event.prompt_logprobs, starts, strict=False
            )
        ]


def _unshown(tokenizer: ModelTokenizer, sampling: SamplingParams) -> frozenset[int]:
    """Tokens without text: special ones, and those that end the answer by their id."""
    ends = {*sampling.stop_token_ids}
    if tokenizer.eos_id is not None:
        ends.add(tokenizer.eos_id)
    return tokenizer.special_ids | ends
