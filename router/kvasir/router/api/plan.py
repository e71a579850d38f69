"""A request on its way: what is asked of the dispatcher, and what has come of it.

A ``Plan`` has one ``Choice`` for each choice of the answer, prompt by prompt: choice
``p * n + i`` is the i-th of prompt p. Each has a generation of its own; but a beam search has one
for all choices of a prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvasir.proto.sampling import SamplingParams
from kvasir.router.api.choice import Choice, Echo
from kvasir.router.api.responses import Usage
from kvasir.router.api.validate import child_seed
from kvasir.router.contracts import BeamSearch, Generation
from kvasir.router.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """One prompt, how its choices are drawn, and whether it is shown before them."""

    ids: tuple[int, ...]
    sampling: SamplingParams
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class Common:
    """What all choices of a request share."""

    request_id: str
    n: int
    stops: tuple[str, ...]
    cache_salt: bytes
    priority: int
    beam: BeamSearch | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    generations: tuple[Generation, ...]
    choices: tuple[Choice, ...]
    n: int

    @classmethod
    def of(
        cls, common: Common, prompts: Sequence[PlannedPrompt], tokenizer: ModelTokenizer
    ) -> "Plan":
        generations: list[Generation] = []
        choices: list[Choice] = []
        for prompt in prompts:
            alone = common.n == 1 or common.beam is not None
            group = "" if alone else f"{common.request_id}-{len(choices)}"
            for child in range(common.n):
                index = len(choices)
                seed = child_seed(prompt.sampling.seed, child)
                sampling = replace(prompt.sampling, seed=seed)
                choices.append(Choice(index, tokenizer, sampling, common.stops, prompt.echo))
                if child and common.beam is not None:
                    continue
                generations.append(
                    Generation(
                        request_id=f"{common.request_id}-{index}",
                        prompt_ids=prompt.ids,
                        sampling=sampling,
                        cache_salt=common.cache_salt,
                        priority=common.priority,
                        group=group,
                        beam=common.beam,
                    )
                )
        return cls(tuple(generations), tuple(choices), common.n)

    def followed(self) -> Iterator[tuple[Generation, Sequence[Choice]]]:
        """Each generation with the choices that it gives."""
        each = len(self.choices) // len(self.generations)
        for index, generation in enumerate(self.generations):
            yield generation, self.choices[index * each : (index + 1) * each]

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has.

        Choices of one prompt run side by side and find what the first of them computed in
        the cache; only what was there before any of them was saved, so the least counts.
        """
        prompt_tokens = cached_tokens = 0
        each = len(self.choices) // len(self.generations)
        for first in range(0, len(self.choices), self.n):
            prompt_tokens += len(self.generations[first // each].prompt_ids)
            cached_tokens += min(c.cached_tokens or 0 for c in self.choices[first : first + self.n])
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def served_by(self) -> dict[str, str]:
        """Response headers that name the workers known so far."""
        decode = {choice.decode_worker: None for choice in self.choices if choice.decode_worker}
        prefill = {choice.prefill_worker: None for choice in self.choices if choice.prefill_worker}
        headers = {}
        if decode:
            headers["x-kvasir-decode-worker"] = ", ".join(decode)
        if prefill:
            headers["x-kvasir-prefill-worker"] = ", ".join(prefill)
        return headers
