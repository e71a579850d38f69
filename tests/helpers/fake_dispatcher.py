"""A dispatcher without workers: tests say which tokens it answers, and see what it was asked.

By default it answers with ``script``, which gives the output tokens of a generation. Tokens
come one per event, as from a decode worker; ``gate`` can hold them back.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from helpers.bundled_tokenizer import IM_END, VOCAB_SIZE, tokenizer_files
from kvasir.proto.sampling import TokenLogprobs
from kvasir.router.contracts import (
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    ModelCard,
    Refused,
    TokenEvent,
    WorkerStatus,
)

Script = Callable[[Generation], Sequence[int]]

CARD = ModelCard(
    name="smollm2",
    max_model_len=2048,
    vocab_size=VOCAB_SIZE,
    block_size=16,
    tokenizer_hash="bundled",
)


@dataclass
class FakeDispatcher:
    """Satisfies kvasir.router.contracts.Dispatcher."""

    script: Script
    card: ModelCard | None = CARD
    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    is_ready: bool = True
    refuse_after: int | None = None
    """Tokens after which ``refused`` ends a generation."""
    refused: Refused | None = None
    crash_after: int | None = None
    """Tokens after which the dispatcher itself fails."""
    tokens_per_event: int = 1
    gate: asyncio.Event | None = None
    """Tokens after the first event wait for it."""
    prefill_worker: str | None = "prefill-0"
    cached_tokens: int = 0

    asked: list[Generation] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    sent_tokens: int = 0
    held_requests: int = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        self.held_requests += 1
        try:
            yield
        finally:
            self.held_requests -= 1

    async def generate(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        self.asked.append(generation)
        self.live.add(generation.request_id)
        done = False
        try:
            async for event in self._events(generation):
                done = not isinstance(event, TokenEvent)
                yield event
        finally:
            self.live.discard(generation.request_id)
            if not done:
                self.aborted.append(generation.request_id)

    async def _events(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        answer = list(self.script(generation))[: generation.sampling.max_tokens]
        for start in range(0, len(answer), self.tokens_per_event):
            self._maybe_crash(start)
            if refused := self._refusal(start):
                yield refused
                return
            if start and self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            ids = answer[start : start + self.tokens_per_event]
            self.sent_tokens += len(ids)
            yield self._token_event(generation, ids, first=start == 0)
        if refused := self._refusal(len(answer)):
            yield refused
            return
        ends = {IM_END, *generation.sampling.stop_token_ids}
        stopped = bool(answer) and answer[-1] in ends
        yield Finished(FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _maybe_crash(self, sent: int) -> None:
        if self.crash_after is not None and sent >= self.crash_after:
            raise RuntimeError("the fake dispatcher was told to fail")

    def _refusal(self, sent: int) -> Refused | None:
        late = self.refuse_after is not None and sent >= self.refuse_after
        return self.refused if late else None

    def _token_event(self, generation: Generation, ids: list[int], *, first: bool) -> TokenEvent:
        wanted = generation.sampling.logprobs
        prompt_wanted = generation.sampling.prompt_logprobs
        return TokenEvent(
            token_ids=tuple(ids),
            logprobs=() if wanted is None else tuple(_scored(i, wanted) for i in ids),
            cached_tokens=self.cached_tokens if first else None,
            decode_worker="decode-0" if first else "",
            prefill_worker=self.prefill_worker if first else None,
            prompt_logprobs=()
            if prompt_wanted is None or not first
            else (None, *(_scored(i, prompt_wanted) for i in generation.prompt_ids[1:])),
        )

    def model(self) -> ModelCard | None:
        return self.card

    async def tokenizer_files(self) -> dict[str, bytes] | None:
        return self.files or None

    def ready(self) -> bool:
        return self.is_ready

    def workers(self) -> list[WorkerStatus]:
        return [WorkerStatus("decode-0", "127.0.0.1:1", "decode", "ready", running=len(self.live))]


def _scored(token_id: int, count: int) -> TokenLogprobs:
    """The drawn token is the most likely one; the others follow it in the vocabulary."""
    top = tuple(((token_id + i) % VOCAB_SIZE, -0.5 - i) for i in range(count))
    return TokenLogprobs(logprob=-0.5, rank=1, top=top)
