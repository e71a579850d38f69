"""Drives a Scheduler and a FakeRunner synchronously, and plays the prefill worker of receives."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from helpers.fake_runner import FakeRunner
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Output, Request, Sampled, StepPlan, Work
from kvasir.worker.scheduler import Scheduler, SchedulerConfig
from kvasir.worker.signals import Progress, Reserved

BLOCK_SIZE = 4
VOCAB_SIZE = 50
EOS = frozenset({7})


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 4,
    *,
    work: Work = Work.GENERATE,
    output_ids: tuple[int, ...] = (),
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: bytes = b"",
    skip_tokens: int = 0,
    group: str = "",
    ignore_eos: bool = True,
    **sampling: object,
) -> Request:
    """A request that, unlike the engine's default, ignores end tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(
        request_id,
        tuple(prompt),
        replace(params, **sampling),  # type: ignore[arg-type]  # fields by name, checked by replace
        output_ids,
        cache_salt,
        priority,
        deadline,
        work,
        skip_tokens,
        group,
    )


class Bench:
    """One scheduler with its runner, stepped by hand; ``outputs`` collects all news by request.

    ``check`` runs after every step. ``pass_seconds``: what a pass of a draft model takes.
    """

    def __init__(
        self,
        num_blocks: int = 16,
        vocab_size: int = VOCAB_SIZE,
        pass_seconds: float = 0.0,
        **config: object,
    ) -> None:
        settings: dict[str, object] = {"max_model_len": 1000, "eos_token_ids": EOS} | config
        self.scheduler = Scheduler(
            SchedulerConfig(num_blocks, BLOCK_SIZE, **settings)  # type: ignore[arg-type]  # by name
        )
        self.vocab_size = vocab_size
        self._pass_seconds = pass_seconds
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE, vocab_size, EOS)
        self.outputs: defaultdict[str, list[Output]] = defaultdict(list)
        self.reserved: list[Reserved] = []
        self.progress: list[Progress] = []

    def step(self, now: float = 0.0) -> StepPlan:
        plan = self.scheduler.plan(now)
        self._collect()
        # A step of the fake costs as much as nine rows more than it has.
        passes = max((chunk.num_to_draft for chunk in plan.chunks), default=0)
        seconds = 9.0 + plan.num_tokens + passes * self._pass_seconds
        self.scheduler.update(plan, self.runner.execute(plan), seconds)
        self._collect()
        self.scheduler.check()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing can be computed; how many steps that took."""
        for steps in range(max_steps):
            if not self.step().chunks:
                return steps
        raise AssertionError(f"work is left after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def commit(self, request_id: str, first_block: int, payload: memoryview) -> bool:
        """What Engine.commit_blocks does."""
        count = payload.nbytes // self.runner.block_bytes
        blocks = self.scheduler.handover.receivable(request_id, first_block, count)
        if blocks is None:
            return False
        self.runner.write_blocks(blocks, payload)
        self.scheduler.handover.committed(request_id, first_block, count)
        self.scheduler.check()
        return True

    def read(self, request_id: str, first_block: int, count: int) -> memoryview | None:
        """What Engine.read_blocks does."""
        found = self.scheduler.handover.readable(request_id, first_block, count)
        return None if found is None else self.runner.read_blocks(*found)

    def _collect(self) -> None:
        for output in self.scheduler.take_outputs():
            self.outputs[output.request_id].append(output)
        for signal in self.scheduler.take_signals():
            if isinstance(signal, Reserved):
                self.reserved.append(signal)
            else:
                self.progress.append(signal)


def remote_prefill(request: Request, vocab_size: int = VOCAB_SIZE) -> tuple[memoryview, Sampled]:
    """All KV of a request's known tokens, and its first token, from a prefill worker of its own."""
    known = len(request.prompt_ids) + len(request.output_ids)
    count = -(-known // BLOCK_SIZE)
    holder = Bench(count, vocab_size)
    holder.scheduler.add(replace(request, work=Work.PREFILL, deadline=None))
    holder.run()
    payload = holder.read(request.request_id, 0, count)
    output = holder.outputs[request.request_id][-1]
    assert payload is not None
    return payload, Sampled(output.token_ids[0], output.logprobs[0] if output.logprobs else None)
