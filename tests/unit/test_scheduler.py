"""Whole schedules, step by step: which request computes how many tokens, and why."""

import pytest

from helpers.engine_workload import BLOCK_SIZE, EOS, VOCAB_SIZE, Bench, make_request, remote_prefill
from helpers.fake_runner import expected_tokens, fake_logprobs
from kvasir.proto.blocks import block_hashes
from kvasir.proto.errors import Reason
from kvasir.worker.block_pool import InvariantError
from kvasir.worker.contracts import (
    BlocksStored,
    Finish,
    KvUsage,
    Load,
    Output,
    PrefillOutcome,
    PrefillReport,
    Request,
    Sampled,
    StepPlan,
    Work,
)
from kvasir.worker.scheduler import SchedulerConfig
from kvasir.worker.signals import Progress, Reserved


def sizes(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def steps(bench: Bench) -> list[dict[str, int]]:
    """Run until nothing can be computed."""
    made = []
    while plan := sizes(bench.step()):
        made.append(plan)
    return made


def expected(request: Request) -> list[int]:
    return expected_tokens(request, VOCAB_SIZE, EOS)


def test_one_request_prefills_in_one_step_and_then_decodes() -> None:
    bench = Bench()
    request = make_request("a", range(6), max_tokens=3)
    bench.scheduler.add(request)
    assert steps(bench) == [{"a": 6}, {"a": 1}, {"a": 1}]
    assert bench.tokens("a") == expected(request)
    first, second, third = bench.outputs["a"]
    assert first.prefill == PrefillReport(0, PrefillOutcome.LOCAL)
    assert second == Output("a", (bench.tokens("a")[1],))
    assert third.finish is Finish.LENGTH


def test_chunks_carry_what_the_runner_needs() -> None:
    bench = Bench(max_batched_tokens=4, prefix_caching=False)
    bench.scheduler.add(make_request("a", range(6), max_tokens=2, min_tokens=1, output_ids=(9,)))
    first, second = bench.step().chunks[0], bench.step().chunks[0]
    assert (first.token_ids, first.start, first.samples) == ((0, 1, 2, 3), 0, ())
    assert (second.token_ids, second.start) == ((4, 5, 9), 4)
    (spec,) = second.samples
    assert (spec.index, spec.forbid_stop) == (1, False)
    assert spec.prompt_ids == (0, 1, 2, 3, 4, 5)
    assert first.block_table == second.block_table
    assert len(set(first.block_table)) == 2


def test_decode_goes_first_and_prefill_fills_the_budget_in_chunks() -> None:
    bench = Bench(max_batched_tokens=5)
    bench.scheduler.add(make_request("a", range(3), max_tokens=5))
    assert sizes(bench.step()) == {"a": 3}
    bench.scheduler.add(make_request("b", range(10, 20), max_tokens=2))
    bench.scheduler.add(make_request("c", range(20, 23), max_tokens=1))
    assert steps(bench) == [
        {"a": 1, "b": 4},
        {"a": 1, "b": 4},
        {"a": 1, "b": 2, "c": 2},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_a_finished_request_makes_room_at_once() -> None:
    bench = Bench(max_running_requests=1)
    bench.scheduler.add(make_request("a", range(3), max_tokens=2))
    bench.scheduler.add(make_request("b", range(3), max_tokens=1))
    assert steps(bench) == [{"a": 3}, {"a": 1}, {"b": 3}]


def test_priority_then_arrival_decides_who_enters() -> None:
    bench = Bench(max_running_requests=1)
    for request_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        bench.scheduler.add(make_request(request_id, range(3), 1, priority=priority))
    assert [list(step) for step in steps(bench)] == [["b"], ["d"], ["a"], ["c"]]


def test_an_equal_prefix_is_computed_once() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(10), max_tokens=1))
    bench.scheduler.add(make_request("b", [*range(8), 40, 41], max_tokens=1))
    assert steps(bench) == [{"a": 10, "b": 10}]
    assert bench.scheduler.load().kv_blocks_cached == 2, "the copy is given up"
    for request_id, prompt in (("c", range(10)), ("d", range(8))):
        request = make_request(request_id, prompt, max_tokens=1)
        bench.scheduler.add(request)
    # The last prompt token is always computed, and with it its block.
    assert steps(bench) == [{"c": 2, "d": 4}]
    reports = [bench.outputs[request_id][0].prefill for request_id in "cd"]
    assert [report and report.cached_tokens for report in reports] == [8, 4]
    assert bench.tokens("c") == bench.tokens("a")
    load = bench.scheduler.load()
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (38, 12)


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    bench = Bench()
    first = make_request("a", range(6), max_tokens=7)
    bench.scheduler.add(first)
    steps(bench)
    bench.scheduler.add(make_request("b", [*range(6), *bench.tokens("a"), 3], max_tokens=1))
    assert steps(bench) == [{"b": 2}]


def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(10), 1, cache_salt=b"one"))
    steps(bench)
    bench.scheduler.add(make_request("b", range(10), 1, cache_salt=b"two"))
    assert steps(bench) == [{"b": 10}]


def test_stored_blocks_are_told_with_the_chain() -> None:
    bench = Bench(max_batched_tokens=6)
    bench.scheduler.add(make_request("a", range(10), 1))
    hashes = tuple(block_hashes(range(10), BLOCK_SIZE))
    bench.step()
    assert bench.scheduler.take_events() == [BlocksStored(b"", hashes[:1])]
    bench.step()
    assert bench.scheduler.take_events() == [BlocksStored(hashes[0], hashes[1:])]
    assert bench.scheduler.cached_hashes() == list(hashes)


def test_the_last_one_is_preempted_and_resumes_with_the_same_answer() -> None:
    bench = Bench(num_blocks=5, prefix_caching=False)
    requests = [make_request(r, [i] * 7, max_tokens=9) for i, r in enumerate("ab")]
    for request in requests:
        bench.scheduler.add(request)
    # Both need a third block for their ninth token; five blocks are not enough.
    assert steps(bench) == [
        {"a": 7, "b": 7},
        *[{"a": 1, "b": 1}],
        *[{"a": 1}] * 7,
        {"b": 9},
        *[{"b": 1}] * 6,
    ]
    assert bench.scheduler.load().preemptions == 1
    for request in requests:
        assert bench.tokens(request.request_id) == expected(request)


def test_a_lower_priority_is_preempted_though_it_came_first() -> None:
    bench = Bench(num_blocks=5, prefix_caching=False)
    bench.scheduler.add(make_request("low", [1] * 7, 9, priority=5))
    bench.scheduler.add(make_request("high", [2] * 7, 9, priority=-5))
    made = steps(bench)
    assert made[2] == {"high": 1}
    assert [set(step) for step in made].index({"low"}) > made.index({"high": 1})


def test_a_newcomer_leaves_growing_ones_a_block_each() -> None:
    bench = Bench(num_blocks=4, prefix_caching=False)
    bench.scheduler.add(make_request("a", range(3), max_tokens=9))
    assert sizes(bench.step()) == {"a": 3}
    bench.scheduler.add(make_request("b", range(12), max_tokens=1))
    made = steps(bench)
    assert made == [*[{"a": 1}] * 8, {"b": 12}]
    assert bench.scheduler.load().preemptions == 0


def test_a_step_in_which_all_is_preempted_admits_who_fits() -> None:
    bench = Bench(num_blocks=4, prefix_caching=False)
    bench.scheduler.add(make_request("hold", range(4), work=Work.PREFILL))
    bench.scheduler.add(make_request("a", range(10, 21), max_tokens=5))
    assert sizes(bench.step()) == {"hold": 4, "a": 11}
    assert sizes(bench.step()) == {"a": 1}
    bench.scheduler.add(make_request("b", range(30, 38), max_tokens=1, priority=-1))
    # "a" needs a fourth block, which a lease keeps: it gives its three up, and "b" takes two.
    assert steps(bench) == [{"b": 8}]
    bench.scheduler.abort("hold")
    assert steps(bench) == [{"a": 13}, {"a": 1}, {"a": 1}]


def test_prompt_logprobs_come_once_and_read_no_cache() -> None:
    bench = Bench(max_batched_tokens=4)
    bench.scheduler.add(make_request("a", range(10), 1))
    steps(bench)
    bench.scheduler.add(make_request("b", range(10), 2, prompt_logprobs=2, output_ids=(5,)))
    # The chunk with the prompt's end stops there, so that no output token is taken for a prompt's.
    assert steps(bench) == [{"b": 4}, {"b": 4}, {"b": 2}, {"b": 1}]
    (output,) = bench.outputs["b"]
    assert output.prompt_logprobs == (None, *(fake_logprobs(token, 2) for token in range(1, 10)))
    assert output.prefill == PrefillReport(0, PrefillOutcome.LOCAL)


def test_prompt_logprobs_start_again_after_a_preemption() -> None:
    bench = Bench(num_blocks=6, max_batched_tokens=3, prefix_caching=False)
    bench.scheduler.add(make_request("a", [1, 2, 3], 10))
    bench.step()
    long = make_request("b", range(16), 1, prompt_logprobs=0)
    bench.scheduler.add(long)
    bench.step()
    while bench.scheduler.load().preemptions == 0:
        assert bench.step().chunks
    assert not bench.outputs["b"]
    steps(bench)
    (output,) = bench.outputs["b"]
    assert output.prompt_logprobs == (None, *(fake_logprobs(token, 0) for token in range(1, 16)))
    assert bench.tokens("b") == expected(long)


def first_token(request: Request) -> int:
    return expected(request)[0]


def test_how_a_request_ends() -> None:
    token = first_token(make_request("x", range(5), 1))
    replayed = first_token(make_request("x", range(5), 9, output_ids=(1, 2)))
    cases: list[tuple[Request, int, Finish]] = [
        (make_request("max_tokens", range(5), 2), 2, Finish.LENGTH),
        (make_request("stop", range(5), 9, stop_token_ids=frozenset({token})), 1, Finish.STOP),
        (make_request("last", range(5), 1, stop_token_ids=frozenset({token})), 1, Finish.STOP),
        (
            make_request("replay", range(5), 9, output_ids=(1, 2)),
            7,
            Finish.LENGTH,
        ),
        (
            make_request(
                "replay-stop", range(5), 9, output_ids=(1, 2), stop_token_ids=frozenset({replayed})
            ),
            1,
            Finish.STOP,
        ),
        (make_request("replay-done", range(5), 2, output_ids=(1, 2)), 0, Finish.LENGTH),
    ]
    for request, count, finish in cases:
        bench = Bench()
        bench.scheduler.add(request)
        steps(bench)
        assert bench.tokens(request.request_id) == expected(request)
        assert len(bench.tokens(request.request_id)) == count, request.request_id
        assert bench.outputs[request.request_id][-1].finish is finish, request.request_id
        assert not bench.scheduler.request_ids()


def test_end_tokens_stop_unless_ignored_or_too_early() -> None:
    token = first_token(make_request("x", range(5), 1))
    for changes, count in (
        ({"ignore_eos": False}, 1),
        ({"ignore_eos": True}, 3),
        ({"ignore_eos": False, "min_tokens": 2}, 3),
    ):
        bench = Bench(eos_token_ids=frozenset({token}))
        bench.scheduler.add(make_request("a", range(5), 3, **changes))
        plan = bench.step()
        (spec,) = plan.chunks[0].samples
        assert spec.forbid_stop == ("min_tokens" in changes)
        steps(bench)
        assert len(bench.tokens("a")) == count


def test_the_model_length_ends_a_request() -> None:
    bench = Bench(max_model_len=8)
    request = make_request("a", range(5), 100)
    bench.scheduler.add(request)
    steps(bench)
    assert len(bench.tokens("a")) == 3
    assert bench.outputs["a"][-1].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (make_request("a", range(20), 1), Reason.CONTEXT_LENGTH_EXCEEDED, ["20", "19"]),
        (make_request("a", range(19), 1), None, []),
        (
            make_request("a", range(19), 1, work=Work.PREFILL, output_ids=(1,)),
            Reason.CONTEXT_LENGTH_EXCEEDED,
            ["20"],
        ),
        (make_request("a", range(10), 7), None, []),
        (make_request("a", range(10), 6, output_ids=(1,)), None, []),
        (make_request("a", [], 1), Reason.INVALID_REQUEST, ["empty"]),
        (make_request("a", range(3), 0), Reason.INVALID_REQUEST, ["max_tokens"]),
        (make_request("a", range(9), skip_tokens=3), Reason.INVALID_REQUEST, ["skip_tokens"]),
    ],
)
def test_what_is_refused(request_: Request, reason: Reason | None, words: list[str]) -> None:
    refusal = SchedulerConfig(num_blocks=5, block_size=4, max_model_len=20).refusal(request_)
    assert (refusal and refusal.reason) == reason
    assert all(refusal and word in refusal.message for word in words)


@pytest.mark.parametrize(("max_tokens", "fits"), [(3, True), (4, False)])
def test_a_request_that_never_fits_the_pool_is_refused(max_tokens: int, fits: bool) -> None:
    config = SchedulerConfig(num_blocks=3, block_size=4, max_model_len=100)
    request = make_request("a", range(10), max_tokens)
    refusal = config.refusal(request)
    assert (refusal is None) == fits
    if refusal is not None:
        assert refusal.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        assert "4 KV blocks" in refusal.message
        assert "has 3" in refusal.message
        return
    bench = Bench(num_blocks=3)
    bench.scheduler.add(request)
    steps(bench)
    assert bench.tokens("a") == expected(request)


def test_config_is_validated() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        SchedulerConfig(1, 1, 1, max_batched_tokens=0)


def test_a_deadline_holds_for_those_that_never_ran() -> None:
    bench = Bench(max_running_requests=1)
    bench.scheduler.add(make_request("a", range(3), 3, deadline=10.0))
    bench.scheduler.add(make_request("b", range(3), 3, deadline=20.0))
    assert bench.scheduler.next_deadline() == 10.0
    bench.step(now=9.0)
    assert bench.scheduler.next_deadline() == 20.0
    assert sizes(bench.step(now=20.0)) == {"a": 1}
    (output,) = bench.outputs["b"]
    assert output.finish is Finish.REFUSED
    assert output.refusal is not None
    assert output.refusal.reason is Reason.DEADLINE_EXCEEDED
    assert bench.scheduler.next_deadline() is None
    steps(bench)
    assert len(bench.tokens("a")) == 3


def test_a_preempted_request_is_owed_its_answer_past_the_deadline() -> None:
    bench = Bench(num_blocks=5, prefix_caching=False)
    for request_id in "ab":
        bench.scheduler.add(make_request(request_id, range(7), 9, deadline=10.0))
    while bench.scheduler.load().preemptions == 0:
        bench.step(now=9.0)
    while bench.scheduler.request_ids():
        bench.step(now=11.0)
    assert bench.outputs["b"][-1].finish is Finish.LENGTH


# --- prefill for others ------------------------------------------------------------------------


def test_a_prefill_holds_its_blocks_until_released() -> None:
    bench = Bench(max_batched_tokens=4)
    request = make_request("p", range(10), 50, work=Work.PREFILL)
    bench.scheduler.add(request)
    assert steps(bench) == [{"p": 4}, {"p": 4}, {"p": 2}]
    admitted, *computed = bench.progress
    assert admitted == Progress("p", 0)
    assert computed == [Progress("p", 4), Progress("p", 8), Progress("p", 10)]
    (output,) = bench.outputs["p"]
    assert output.token_ids == (first_token(request),)
    assert output.finish is Finish.LENGTH
    load = bench.scheduler.load()
    assert (load.running, load.kv_blocks_used, load.active_kv_tokens) == (1, 3, 10)
    payload = bench.read("p", 1, 2)
    assert payload is not None
    assert bytes(payload[6 * 8 :]) == bytes(2 * 8), "the unfilled tail is zero"
    assert bench.scheduler.abort("p"), "no output follows"
    assert bench.read("p", 0, 1) is None
    assert bench.scheduler.load().kv_blocks_used == 0


def test_a_prefill_tells_of_its_cached_prefix_at_once() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(10), 1))
    steps(bench)
    bench.scheduler.add(make_request("p", range(10), 1, work=Work.PREFILL, skip_tokens=4))
    assert steps(bench) == [{"p": 2}]
    assert bench.progress == [Progress("p", 8), Progress("p", 10)]
    assert bench.outputs["p"][0].prefill == PrefillReport(8, PrefillOutcome.LOCAL)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 3), (2, 1), (1 << 60, 1)])
def test_only_computed_blocks_can_be_read(first: int, count: int) -> None:
    bench = Bench(max_batched_tokens=5)
    bench.scheduler.add(make_request("p", range(10), work=Work.PREFILL))
    bench.step()
    assert bench.read("p", 0, 2) is not None
    with pytest.raises(ValueError, match="computed"):
        bench.read("p", first, count)


def test_leased_blocks_are_never_preempted() -> None:
    bench = Bench(num_blocks=6, max_batched_tokens=3, prefix_caching=False)
    bench.scheduler.add(make_request("a", range(3), 12))
    bench.step()
    bench.scheduler.add(make_request("p", range(20, 36), work=Work.PREFILL))
    made = steps(bench)
    assert [step["p"] for step in made] == [2, 2, 2, 2, 2, 3, 3], "without a restart"
    assert bench.scheduler.load().preemptions == 1
    bench.scheduler.abort("p")
    steps(bench)
    assert bench.tokens("a") == expected(make_request("a", range(3), 12))


# --- receiving ---------------------------------------------------------------------------------


def receiving(
    bench: Bench, prompt: range, max_tokens: int = 4
) -> tuple[Request, memoryview, Sampled]:
    request = make_request("r", prompt, max_tokens, work=Work.RECEIVE)
    bench.scheduler.add(request)
    assert sizes(bench.step()) == {}
    return (request, *remote_prefill(request))


@pytest.mark.parametrize("length", [1, 3, 4, 8, 10])
def test_a_received_prompt_is_decoded_from_its_first_token(length: int) -> None:
    bench = Bench()
    request, payload, sampled = receiving(bench, range(length))
    assert bench.reserved == [Reserved("r", 0)]
    blocks = -(-length // BLOCK_SIZE)
    unused = blocks * BLOCK_SIZE - length
    assert bench.scheduler.load() == Load(
        running=1,
        kv_blocks_total=16,
        kv_blocks_used=blocks,
        prefix_query_tokens=length,
        kv=KvUsage(reserved=length, internal=unused, table_entries=blocks),
    )
    assert bench.commit("r", 0, payload)
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    assert steps(bench) == [{"r": 1}] * 3
    assert bench.tokens("r") == expected(request)
    assert bench.outputs["r"][0].prefill == PrefillReport(0, PrefillOutcome.REMOTE)


def test_a_request_that_ends_with_its_received_token() -> None:
    bench = Bench()
    request, payload, sampled = receiving(bench, range(6), max_tokens=1)
    bench.commit("r", 0, payload)
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    assert steps(bench) == []
    assert bench.tokens("r") == expected(request)
    assert not bench.scheduler.request_ids()


def test_cached_tokens_of_both_workers_count() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(6), 1))
    steps(bench)
    request, payload, sampled = receiving(bench, range(14))
    assert bench.reserved == [Reserved("r", 4)]
    bench.commit("r", 1, payload[bench.runner.block_bytes :])
    bench.scheduler.handover.finish_receive("r", sampled, 8)
    steps(bench)
    assert bench.tokens("r") == expected(request)
    assert bench.outputs["r"][0].prefill == PrefillReport(12, PrefillOutcome.REMOTE)


def test_committed_blocks_can_be_hit_while_receiving_goes_on() -> None:
    bench = Bench()
    _, payload, _ = receiving(bench, range(14))
    size = bench.runner.block_bytes
    bench.commit("r", 1, payload[size : 2 * size])
    assert bench.scheduler.cached_hashes() == [], "there is a gap before it"
    bench.commit("r", 0, payload[:size])
    assert bench.scheduler.cached_hashes() == block_hashes(range(8), BLOCK_SIZE)


@pytest.mark.parametrize(
    ("length", "committed", "computed"),
    [
        (14, [], 14),
        (14, [0, 1], 6),
        (14, [0, 2], 10),
        (14, [1, 2], 14),
        (14, [0, 1, 2, 3], 2),
        (8, [0, 1], 4),  # the last token gives the first output, so its block is computed
    ],
)
@pytest.mark.parametrize("claims_to_be_complete", [False, True])
def test_a_failed_receive_keeps_contiguous_blocks(
    length: int, committed: list[int], computed: int, claims_to_be_complete: bool
) -> None:
    bench = Bench()
    request, payload, sampled = receiving(bench, range(length))
    size = bench.runner.block_bytes
    for block in committed:
        bench.commit("r", block, payload[block * size : (block + 1) * size])
    complete = len(committed) * size == payload.nbytes
    if claims_to_be_complete and not complete:
        bench.scheduler.handover.finish_receive("r", sampled, 0)
    else:
        bench.scheduler.handover.fail_receive("r", peer_fault=True)
    assert not bench.commit("r", 0, payload), "a late frame changes nothing"
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    assert steps(bench)[0] == {"r": computed}
    assert bench.tokens("r") == expected(request)
    assert bench.outputs["r"][0].prefill == PrefillReport(
        0, PrefillOutcome.RECOMPUTED, peer_fault=not (claims_to_be_complete and not complete)
    )


@pytest.mark.parametrize(
    ("first", "count"), [(-1, 1), (1, 0), (0, 1), (1, 1), (3, 2), (1 << 60, 1)]
)
def test_only_missing_blocks_of_the_request_can_be_filled(first: int, count: int) -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(6), 1))
    steps(bench)
    _, payload, _ = receiving(bench, range(14))
    size = bench.runner.block_bytes
    bench.commit("r", 1, payload[size : 2 * size])
    with pytest.raises(ValueError, match="blocks"):
        bench.scheduler.handover.receivable("r", first, count)
    assert bench.scheduler.handover.receivable("r", 2, 2) is not None
    assert bench.scheduler.handover.receivable("a", 0, 1) is None


def test_an_own_copy_is_given_up_for_a_stored_block() -> None:
    bench = Bench()
    request, payload, sampled = receiving(bench, range(10))
    bench.scheduler.add(make_request("a", range(10), 1))
    steps(bench)
    bench.commit("r", 0, payload)
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    assert bench.scheduler.load().kv_blocks_used == 3
    assert bench.scheduler.load().kv_blocks_cached == 0
    steps(bench)
    assert bench.tokens("r") == expected(request)


def test_receiving_is_not_preempted_and_local_work_goes_on() -> None:
    bench = Bench(num_blocks=5, prefix_caching=False)
    other = make_request("a", range(20, 23), max_tokens=10)
    bench.scheduler.add(other)
    bench.step()
    request = make_request("r", range(10), 1, work=Work.RECEIVE)
    bench.scheduler.add(request)
    assert steps(bench) == [{"a": 1}] * 5, "it gives up where it needs a third block"
    assert (bench.scheduler.load().preemptions, bench.scheduler.load().waiting) == (1, 1)
    payload, sampled = remote_prefill(request)
    assert bench.commit("r", 0, payload)
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    steps(bench)
    assert bench.tokens("r") == expected(request)
    assert bench.tokens("a") == expected(other)


def test_a_received_sequence_is_recomputed_after_a_preemption() -> None:
    bench = Bench(num_blocks=5, prefix_caching=False)
    bench.scheduler.add(make_request("a", range(20, 23), max_tokens=14))
    bench.step()
    request = make_request("r", range(7), 9, work=Work.RECEIVE)
    bench.scheduler.add(request)
    bench.step()
    payload, sampled = remote_prefill(request)
    bench.commit("r", 0, payload)
    bench.scheduler.handover.finish_receive("r", sampled, 0)
    steps(bench)
    assert bench.scheduler.load().preemptions == 1
    assert len(bench.reserved) == 1
    assert bench.tokens("r") == expected(request)


def test_prompt_logprobs_are_never_received() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("r", range(6), 1, work=Work.RECEIVE, prompt_logprobs=0))
    assert steps(bench) == [{"r": 6}]
    assert not bench.reserved
    assert bench.outputs["r"][0].prefill == PrefillReport(0, PrefillOutcome.LOCAL)


# --- aborts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", list(Work))
@pytest.mark.parametrize("after_steps", range(5))
def test_an_abort_at_any_stage_frees_everything(work: Work, after_steps: int) -> None:
    bench = Bench(max_batched_tokens=4)
    bench.scheduler.add(make_request("a", range(10), 50, work=work))
    for _ in range(after_steps):
        bench.step()
    bench.scheduler.abort("a")
    bench.scheduler.abort("a")
    bench.scheduler.check()
    assert steps(bench) == []
    finishes = [o.finish for o in bench.outputs["a"] if o.finish]
    held = work is Work.PREFILL and after_steps >= 3
    assert finishes == [Finish.LENGTH if held else Finish.ABORTED]
    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.kv_blocks_used, load.active_kv_tokens) == (0, 0, 0, 0)


def test_an_id_in_use_is_a_broken_invariant() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(3)))
    with pytest.raises(InvariantError, match="twice"):
        bench.scheduler.add(make_request("a", range(3)))


def test_check_finds_a_leak() -> None:
    bench = Bench()
    bench.scheduler.add(make_request("a", range(3)))
    bench.step()
    del bench.scheduler._roster._sequences["a"]
    with pytest.raises(InvariantError, match="0 sequences hold it"):
        bench.scheduler.check()


def test_load_counts_what_is_queued() -> None:
    bench = Bench(max_batched_tokens=4, max_running_requests=1)
    bench.scheduler.add(make_request("a", range(10)))
    bench.scheduler.add(make_request("b", range(3)))
    bench.step()
    assert bench.scheduler.load() == Load(
        running=1,
        waiting=1,
        queued_prefill_tokens=9,
        active_kv_tokens=4,
        kv_blocks_total=16,
        kv_blocks_used=3,
        prefix_query_tokens=10,
        kv=KvUsage(filled=4, reserved=6, internal=2, table_entries=3),
        prefill_tokens=4,
    )


@pytest.mark.parametrize("work", [Work.GENERATE, Work.RECEIVE])
@pytest.mark.parametrize(("max_tokens", "replayed"), [(3, 3), (3, 7), (90, 4), (90, 30)])
def test_a_replay_at_its_limit_ends_even_where_the_pool_has_no_room_to_spare(
    work: Work, max_tokens: int, replayed: int
) -> None:
    """The pool holds exactly what a sequence of 16 tokens needs before its last one is drawn."""
    bench = Bench(num_blocks=-(-15 // BLOCK_SIZE), max_model_len=16)
    request = make_request("r", range(12), max_tokens, output_ids=tuple(range(replayed)), work=work)
    assert bench.scheduler.config.refusal(request) is None
    bench.scheduler.add(request)
    assert bench.scheduler.take_outputs() == [Output("r", finish=Finish.LENGTH)]
    assert bench.scheduler.request_ids() == []
