"""Step plans without a scheduler: enough to drive a Runner in tests of the model.

Each sequence gets its own blocks in random order, so a result that depends on where the
blocks lie, or on anyone else's blocks, shows.
"""

import random
from dataclasses import dataclass, field

from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Chunk, Runner, SampleSpec, StepPlan

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class TinySequence:
    request_id: str
    prompt: tuple[int, ...]
    block_table: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    computed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


class TinyScheduler:
    """Runs every sequence in every step, each with a chunk of at most ``chunk_tokens``."""

    def __init__(self, runner: Runner, block_size: int, seed: int = 0) -> None:
        self._runner = runner
        self._block_size = block_size
        self._free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free)
        self.sequences: list[TinySequence] = []

    def add(
        self,
        prompt: list[int],
        room: int,
        sampling: SamplingParams = GREEDY,
        share: TinySequence | None = None,
    ) -> TinySequence:
        """Add a sequence with room for ``room`` output tokens.

        ``share``: use the whole blocks that this sequence has computed and that hold a
        prefix of ``prompt``, as a prefix cache would.
        """
        cached: tuple[int, ...] = ()
        if share is not None:
            common = 0
            for ours, theirs in zip(prompt[:-1], share.tokens[: share.computed], strict=False):
                if ours != theirs:
                    break
                common += 1
            cached = share.block_table[: common // self._block_size]
        needed = -(-(len(prompt) + room) // self._block_size) - len(cached)
        own = tuple(self._free.pop() for _ in range(needed))
        sequence = TinySequence(
            request_id=str(len(self.sequences)),
            prompt=tuple(prompt),
            block_table=cached + own,
            sampling=sampling,
            computed=len(cached) * self._block_size,
        )
        self.sequences.append(sequence)
        return sequence

    def chunk(self, sequence: TinySequence, chunk_tokens: int) -> Chunk:
        known = sequence.tokens
        end = min(sequence.computed + chunk_tokens, len(known))
        spec = SampleSpec(
            params=sequence.sampling,
            index=len(sequence.output),
            prompt_ids=sequence.prompt,
            output_ids=tuple(sequence.output),
        )
        return Chunk(
            request_id=sequence.request_id,
            token_ids=known[sequence.computed : end],
            start=sequence.computed,
            block_table=sequence.block_table,
            samples=(spec,) if end == len(known) else (),
        )

    def step(self, chunk_tokens: int, max_output: int) -> bool:
        """One step for every sequence with work left; False when there is none."""
        live = [s for s in self.sequences if len(s.output) < max_output]
        if not live:
            return False
        chunks = [self.chunk(sequence, chunk_tokens) for sequence in live]
        result = self._runner.execute(StepPlan(tuple(chunks)))
        assert set(result) == {chunk.request_id for chunk in chunks}
        for sequence, chunk in zip(live, chunks, strict=True):
            sequence.computed += len(chunk.token_ids)
            drawn = result[sequence.request_id].sampled
            assert len(drawn) == len(chunk.samples)
            sequence.output.extend(one.token_id for one in drawn)
        return True

    def run(self, chunk_tokens: int, max_output: int) -> None:
        while self.step(chunk_tokens, max_output):
            pass
