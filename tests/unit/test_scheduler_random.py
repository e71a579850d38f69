"""Random workloads in pools that are too small: every answer is the one of a request alone."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engine_workload import BLOCK_SIZE, EOS, VOCAB_SIZE, Bench, make_request, remote_prefill
from helpers.fake_runner import expected_tokens, fake_logprobs
from kvasir.worker.contracts import Finish, PrefillOutcome, Request, Work
from kvasir.worker.speculation.config import Method, SpeculationConfig

# Few tokens and short periods, so that prompts share prefixes and blocks often.
PROMPTS = st.builds(
    lambda head, tail: [1] * head + tail,
    st.sampled_from([0, 8, 9, 13]),
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    made: list[Request] = []
    for i in range(draw(st.integers(2, 8))):
        max_tokens = draw(st.sampled_from([1, 2, 10, 15, 20]))
        sibling = draw(st.sampled_from([None, *made]))
        made.append(
            make_request(
                f"r{i}",
                draw(PROMPTS) if sibling is None else sibling.prompt_ids,
                max_tokens,
                group=f"group {i}" if sibling is None else sibling.group,
                work=draw(st.sampled_from([Work.GENERATE, Work.GENERATE, Work.RECEIVE])),
                output_ids=tuple(draw(st.sampled_from([[], [], [1], [2] * max_tokens]))),
                priority=draw(st.integers(0, 2)),
                cache_salt=draw(st.sampled_from([b"", b"", b"", b"tenant"])),
                ignore_eos=draw(st.sampled_from([True, True, False])),
                stop_token_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE), max_size=1))),
                min_tokens=draw(st.integers(0, 3)),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                seed=draw(st.integers(0, 3)),
                prompt_logprobs=draw(st.sampled_from([None, None, 1])),
                logprobs=draw(st.sampled_from([None, 2])),
            )
        )
    return made


SPECULATION = st.none() | st.builds(
    SpeculationConfig,
    method=st.sampled_from(Method),
    num_tokens=st.integers(1, 6),
    adaptive=st.booleans(),
)


@dataclass
class Fate:
    """What happens to one request while the workload runs."""

    arrives: int
    aborted: int | None
    blocks_until_failure: int | None
    blocks_per_commit: int
    claims_to_be_complete: bool
    sent: int = field(default=0)


FATES = st.builds(
    Fate,
    arrives=st.integers(0, 6),
    aborted=st.sampled_from([None] * 12 + [0, 1, 2, 5, 12]),
    blocks_until_failure=st.sampled_from([None, None, 0, 1, 2, 3, 4, 5]),
    blocks_per_commit=st.integers(1, 3),
    claims_to_be_complete=st.booleans(),
)


class Workload:
    def __init__(self, bench: Bench, pending: list[Request], fates: list[Fate]) -> None:
        self.bench = bench
        self.requests = {request.request_id: request for request in pending}
        self.fates = {r.request_id: fate for r, fate in zip(pending, fates, strict=True)}
        self.receiving: set[str] = set()

    def run(self) -> None:
        scheduler = self.bench.scheduler
        last_arrival = max(fate.arrives for fate in self.fates.values())
        for step in range(2000):
            for request_id, fate in self.fates.items():
                if fate.arrives == step:
                    scheduler.add(self.requests[request_id])
                if fate.aborted is not None and fate.arrives + fate.aborted == step:
                    scheduler.abort(request_id)
            self._transfer()
            self.bench.step()
            if step > last_arrival and not scheduler.request_ids():
                return
        raise AssertionError("the workload does not come to its end")

    def _transfer(self) -> None:
        """One frame, the end or the failure of each open transfer."""
        for signal in self.bench.reserved:
            self.receiving.add(signal.request_id)
            self.fates[signal.request_id].sent = signal.num_cached_tokens // BLOCK_SIZE
        self.bench.reserved.clear()
        for request_id in sorted(self.receiving):
            request, fate = self.requests[request_id], self.fates[request_id]
            payload, sampled = remote_prefill(request, self.bench.vocab_size)
            size = self.bench.runner.block_bytes
            total = payload.nbytes // size
            stop = total if fate.blocks_until_failure is None else fate.blocks_until_failure
            end = min(fate.sent + fate.blocks_per_commit, total, max(stop, fate.sent))
            if end > fate.sent:
                self.bench.commit(request_id, fate.sent, payload[fate.sent * size : end * size])
                fate.sent = end
                continue
            self.receiving.remove(request_id)
            if fate.blocks_until_failure is None or (fate.claims_to_be_complete and end < total):
                self.bench.scheduler.handover.finish_receive(request_id, sampled, 0)
            else:
                self.bench.scheduler.handover.fail_receive(request_id)


def peak(request: Request) -> int:
    return -(-(len(request.prompt_ids) + request.sampling.max_tokens) // BLOCK_SIZE)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_outputs_equal_those_of_each_request_alone(data: st.DataObject) -> None:
    pending = data.draw(requests())
    fates = [data.draw(FATES) for _ in pending]
    bench = Bench(
        max(peak(request) for request in pending) + data.draw(st.integers(0, 3)),
        max_batched_tokens=data.draw(st.sampled_from([1, 3, 8, 20, 50])),
        max_running_requests=data.draw(st.integers(2, 6)),
        prefix_caching=data.draw(st.sampled_from([True, True, False])),
        speculation=data.draw(SPECULATION),
        # With three tokens, most of what comes has come before.
        vocab_size=data.draw(st.sampled_from([VOCAB_SIZE, 3])),
    )
    Workload(bench, pending, fates).run()

    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)
    for request, fate in zip(pending, fates, strict=True):
        assert_right_answer(bench, request, aborted=fate.aborted is not None)


def assert_right_answer(bench: Bench, request: Request, *, aborted: bool) -> None:
    outputs = bench.outputs[request.request_id]
    expected = expected_tokens(request, bench.vocab_size, EOS)
    tokens = bench.tokens(request.request_id)
    logprobs = [one for output in outputs for one in output.logprobs]
    top = request.sampling.logprobs
    assert logprobs == ([] if top is None else [fake_logprobs(token, top) for token in tokens])
    finishes = [output.finish for output in outputs if output.finish is not None]
    assert len(finishes) == 1, "finish is told exactly once"
    assert outputs[-1].finish is not None, "nothing follows the finish"
    if finishes == [Finish.ABORTED]:
        assert aborted
        assert tokens == expected[: len(tokens)]
        return
    assert tokens == expected
    if not expected:
        return
    reports = [output.prefill for output in outputs if output.prefill is not None]
    assert reports == [outputs[0].prefill], "the report comes once, with the first token"
    assert outputs[0].prefill is not None
    assert outputs[0].prefill.cached_tokens <= len(request.prompt_ids)
    if request.work is Work.GENERATE:
        assert outputs[0].prefill.outcome is PrefillOutcome.LOCAL
    wanted = request.sampling.prompt_logprobs
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    if wanted is None:
        assert told == []
    else:
        following = (fake_logprobs(token, wanted) for token in request.prompt_ids[1:])
        assert told == [(None, *following)]
