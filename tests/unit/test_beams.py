"""Beam search in the scheduler: blocks, preemption, receiving; and the rules of the search itself.

The search's rules are compared with transformers' in tests/integration/test_beam_search.py. Here
it runs on FakeRunner, whose candidates depend on every byte of KV, against the same search
without any blocks.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engine_workload import BLOCK_SIZE, EOS, VOCAB_SIZE, Bench, make_request, remote_prefill
from helpers.fake_runner import expected_tokens
from kvasir.proto.errors import Reason
from kvasir.worker.beam_search import BeamSearch, num_candidates
from kvasir.worker.contracts import (
    BeamParams,
    Finish,
    Hypothesis,
    PrefillOutcome,
    PrefillReport,
    Request,
    Work,
)
from kvasir.worker.scheduler import SchedulerConfig
from kvasir.worker.speculation.config import Method, SpeculationConfig


def beams(
    request_id: str,
    prompt: tuple[int, ...],
    max_tokens: int = 6,
    width: int = 3,
    penalty: float = 1.0,
    work: Work = Work.GENERATE,
) -> Request:
    params = BeamParams(width, penalty)
    request = make_request(
        request_id,
        prompt,
        max_tokens,
        work=work,
        ignore_eos=False,
        temperature=0.0,
        logprobs=num_candidates(params, len(EOS)),
    )
    return replace(request, beam=params)


def expected_hypotheses(request: Request) -> tuple[Hypothesis, ...]:
    """The search with the candidates that FakeRunner gives, and no blocks."""
    assert request.beam is not None
    assert request.sampling.logprobs is not None
    search = BeamSearch(request.beam, EOS, request.sampling.max_tokens)
    plain = replace(request, beam=None, work=Work.GENERATE)
    outputs: list[tuple[int, ...]] = [()]
    while True:
        candidates = []
        for tokens in outputs:
            limit = replace(plain.sampling, max_tokens=len(tokens) + 1)
            (drawn,) = expected_tokens(
                replace(plain, output_ids=tokens, sampling=limit), VOCAB_SIZE, EOS
            )
            found = [(drawn + i, -1.0 - i) for i in range(request.sampling.logprobs)]
            candidates.append(found)
        live = search.advance(candidates)
        if not live:
            return search.hypotheses
        outputs = [(*outputs[beam.parent], beam.token_id) for beam in live]


def assert_found(bench: Bench, request: Request) -> None:
    (output,) = bench.outputs[request.request_id]
    assert output.hypotheses == expected_hypotheses(request)
    assert output.finish is output.hypotheses[0].finish
    assert output.token_ids == ()


def test_beams_share_blocks_and_decode_in_one_step() -> None:
    bench = Bench(64)
    request = beams("r", tuple(range(10)), max_tokens=9)
    bench.scheduler.add(request)
    assert [len(chunk.token_ids) for chunk in bench.step().chunks] == [10]
    # All three continue the root: its two full blocks are shared, the third is copied on write.
    assert bench.scheduler.load().kv_blocks_used == 3
    assert bench.scheduler.load().kv.filled == 10
    second = bench.step()
    assert [len(chunk.token_ids) for chunk in second.chunks] == [1, 1, 1]
    assert len(second.copies) == 2, "the last holder of a block writes to it in place"
    tables = [chunk.block_table for chunk in second.chunks]
    assert len({table[:2] for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    bench.run()
    assert_found(bench, request)
    assert bench.scheduler.load().kv_blocks_used == 0
    assert bench.outputs["r"][0].prefill == PrefillReport(0, PrefillOutcome.LOCAL)


def test_a_received_prompt_is_searched_from() -> None:
    bench = Bench(64)
    request = beams("r", tuple(range(10)), work=Work.RECEIVE)
    bench.scheduler.add(request)
    bench.step()
    payload, sampled = remote_prefill(replace(request, beam=None))
    bench.commit("r", 0, payload)
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    bench.run()
    assert_found(bench, request)
    assert bench.outputs["r"][0].prefill == PrefillReport(0, PrefillOutcome.REMOTE)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_frees_the_blocks_of_all_beams(steps: int) -> None:
    bench = Bench(64, prefix_caching=False)
    bench.scheduler.add(beams("r", tuple(range(10))))
    for _ in range(steps):
        bench.step()
    bench.scheduler.abort("r")
    bench.scheduler.check()
    assert bench.scheduler.load().kv_blocks_used == 0
    assert bench.scheduler.request_ids() == []
    assert not bench.step().chunks
    assert bench.outputs["r"][-1].finish is Finish.ABORTED


def test_what_can_never_be_searched_is_refused() -> None:
    config = SchedulerConfig(8, BLOCK_SIZE, max_model_len=100, max_batched_tokens=4)
    assert config.refusal(beams("r", (1, 2, 3), 6, width=4)) is None
    too_wide = config.refusal(beams("r", (1, 2, 3), 2, width=5))
    assert too_wide is not None
    assert (too_wide.reason, too_wide.param) == (Reason.INVALID_REQUEST, "n")
    too_large = config.refusal(beams("r", (1, 2, 3), 10, width=4))
    assert too_large is not None
    assert too_large.reason is Reason.CONTEXT_LENGTH_EXCEEDED


# Few tokens, so that prompts and beams share prefixes.
SEARCHES: st.SearchStrategy[Callable[[str], Request]] = st.builds(
    lambda prompt, max_tokens, width, penalty: (
        lambda name: beams(name, tuple(prompt), max_tokens, width, penalty)
    ),
    st.lists(st.integers(1, 2), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.0, 2.0, -1.0]),
)


@settings(max_examples=100, deadline=None)
@given(
    searches=st.lists(SEARCHES, min_size=1, max_size=3),
    others=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), max_size=3),
    spare=st.integers(0, 4),
    budget=st.sampled_from([3, 5, 20]),
    caching=st.booleans(),
    speculation=st.none()
    | st.builds(SpeculationConfig, method=st.sampled_from(Method), num_tokens=st.integers(1, 6)),
)
def test_searches_in_a_pool_that_is_too_small_find_the_same(
    searches: list[Callable[[str], Request]],
    others: list[list[int]],
    spare: int,
    budget: int,
    caching: bool,
    speculation: SpeculationConfig | None,
) -> None:
    """Others may decode speculatively in the same steps."""
    requests = [search(f"s{i}") for i, search in enumerate(searches)]
    plain = [make_request(f"p{i}", prompt, 9) for i, prompt in enumerate(others)]
    config = SchedulerConfig(1, BLOCK_SIZE, max_model_len=1000)
    needed = [config.peak_blocks(r) * (r.beam.width if r.beam else 1) for r in (*requests, *plain)]
    bench = Bench(
        max(needed) + spare,
        max_batched_tokens=budget,
        prefix_caching=caching,
        speculation=speculation,
    )
    for request in (*requests, *plain):
        bench.scheduler.add(request)
    bench.run(5000)
    for request in requests:
        assert_found(bench, request)
    for request in plain:
        assert bench.tokens(request.request_id) == expected_tokens(request, VOCAB_SIZE, EOS)
    assert bench.scheduler.load().kv_blocks_used == 0


def test_a_preempted_search_starts_again() -> None:
    bench = Bench(15, prefix_caching=False)
    first = make_request("first", range(30), 20)
    request = beams("r", tuple(range(6)), max_tokens=10)
    bench.scheduler.add(first)
    bench.scheduler.add(request)
    bench.run()
    assert bench.scheduler.load().preemptions > 0
    assert_found(bench, request)
    assert bench.tokens("first") == expected_tokens(first, VOCAB_SIZE, EOS)


def test_the_best_of_those_that_end_are_kept() -> None:
    search = BeamSearch(BeamParams(2, 1.0), frozenset({9}), 3)
    live = search.advance([[(9, -1.0), (1, -1.5), (2, -2.0)]])
    assert [(beam.token_id, beam.total) for beam in live] == [(1, -1.5), (2, -2.0)]
    assert search.hypotheses == (Hypothesis((9,), Finish.STOP, -1.0),)
    live = search.advance([[(3, -0.1), (9, -0.2), (4, -5.0)], [(9, -0.1), (3, -3.0), (4, -4.0)]])
    # Only the best two of all continuations count as ends: (1, 9) does, (2, 9) does not.
    assert [one.token_ids for one in search.hypotheses] == [(1, 9), (9,)]
    assert [beam.parent for beam in live] == [0, 1]
    assert search.advance([[(5, -0.1)], [(5, -9.0)]]) == (), "the longest output"
    assert search.hypotheses[0].token_ids == (1, 3, 5)
    assert search.hypotheses[0].finish is Finish.LENGTH
