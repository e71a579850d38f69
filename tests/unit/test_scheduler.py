"""The scheduler: batches, chunks, the prefix cache and preemption."""

from helpers.engine_workload import BLOCK_SIZE, Bench, make_request
from helpers.fake_runner import fake_logprobs
from helpers.scheduler_steps import expected, sizes, steps
from kvasir.proto.blocks import block_hashes
from kvasir.worker.contracts import (
    BlocksStored,
    Finish,
    Output,
    PrefillOutcome,
    PrefillReport,
    Work,
)


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
