"""Requests of one group share the blocks of their prompt; each answers as it would alone."""

from collections.abc import Sequence

import pytest

from helpers.engine_workload import BLOCK_SIZE, EOS, VOCAB_SIZE, Bench, make_request, remote_prefill
from helpers.fake_runner import expected_tokens
from kvasir.worker.contracts import BlockCopy, PrefillOutcome, PrefillReport, Request, Work


def group(
    count: int, prompt: Sequence[int], max_tokens: int = 6, work: Work = Work.GENERATE
) -> list[Request]:
    """The choices of an ``n > 1`` request: one prompt, a seed each."""
    return [
        make_request(
            f"c{i}", prompt, max_tokens, work=work, group="g", temperature=1.0, seed=100 + i
        )
        for i in range(count)
    ]


def add(bench: Bench, requests: Sequence[Request]) -> None:
    for request in requests:
        bench.scheduler.add(request)


def assert_answers(bench: Bench, requests: Sequence[Request]) -> None:
    for request in requests:
        tokens = bench.tokens(request.request_id)
        assert tokens == expected_tokens(request, VOCAB_SIZE, EOS), request.request_id


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "shared"), [(3, 0), (10, 2), (11, 2)])
def test_choices_share_full_blocks_and_copy_the_partial_one(
    length: int, shared: int, caching: bool
) -> None:
    bench = Bench(32, prefix_caching=caching)
    requests = group(4, range(length))
    add(bench, requests)
    first = bench.step()
    assert [chunk.request_id for chunk in first.chunks] == ["c0"], "the prompt is computed once"
    second = bench.step()
    assert {c.request_id: len(c.token_ids) for c in second.chunks} == dict.fromkeys(
        ["c0", "c1", "c2", "c3"], 1
    )
    partial = second.chunks[0].block_table[shared]
    assert [copy.source for copy in second.copies] == [partial] * 3
    tables = [chunk.block_table for chunk in second.chunks]
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    assert bench.scheduler.load().kv_blocks_used == shared + 4 * 1
    bench.run()
    assert_answers(bench, requests)


def test_a_prompt_of_whole_blocks_ends_up_shared_entirely() -> None:
    bench = Bench(32)
    requests = group(3, range(8))
    add(bench, requests)
    bench.step()
    second = bench.step()
    assert len(second.copies) == 2, "the last token is computed again, but in a copy"
    bench.step()
    tables = [set(chunk.block_table[:2]) for chunk in bench.step().chunks]
    assert tables[0] == tables[1] == tables[2]
    assert bench.scheduler.load().kv_blocks_used == 2 + 3
    bench.run()
    assert_answers(bench, requests)


def test_a_group_needs_fewer_blocks_than_strangers() -> None:
    def peak(name: str) -> int:
        bench = Bench(100, prefix_caching=False)
        for i in range(8):
            request = make_request(f"c{i}", range(18), 3, group=name, temperature=1.0, seed=i)
            bench.scheduler.add(request)
        used = 0
        while bench.step().chunks:
            used = max(used, bench.scheduler.load().kv_blocks_used)
        return used

    assert (peak("g"), peak("")) == (4 + 8 * 1, 8 * 5)


def test_members_wait_while_the_prompt_is_computed_in_chunks_and_others_do_not() -> None:
    bench = Bench(32, max_batched_tokens=4)
    requests = group(2, range(10))
    other = make_request("other", range(20, 23), 2)
    add(bench, [*requests, other])
    assert bench.scheduler.load().queued_prefill_tokens == 10 + 1 + 3
    steps = [{c.request_id: len(c.token_ids) for c in bench.step().chunks} for _ in range(4)]
    assert steps == [{"c0": 4}, {"c0": 4}, {"c0": 2, "other": 2}, {"c0": 1, "other": 1, "c1": 1}]
    bench.run()
    assert_answers(bench, [*requests, other])


def test_a_member_whose_sibling_is_gone_runs_by_itself() -> None:
    bench = Bench(32, max_batched_tokens=4)
    requests = group(3, range(10))
    add(bench, requests)
    bench.step()
    bench.scheduler.abort("c0")
    bench.run()
    assert_answers(bench, requests[1:])
    late = make_request("late", range(10), 6, group="g", seed=5)
    bench.scheduler.add(late)
    bench.run()
    assert_answers(bench, [late])


def test_another_prompt_or_salt_shares_nothing() -> None:
    bench = Bench(32)
    odd = make_request("odd", range(1, 9), 3, group="g")
    salted = make_request("salted", range(8), 3, group="g", cache_salt=b"s")
    requests = [*group(2, range(8), 3), odd, salted]
    add(bench, requests)
    assert [c.request_id for c in bench.step().chunks] == ["c0", "odd", "salted"]
    bench.run()
    assert_answers(bench, requests)


def test_members_with_prompt_logprobs_compute_every_position() -> None:
    bench = Bench(32)
    requests = [make_request(f"c{i}", range(9), 2, group="g", prompt_logprobs=1) for i in range(2)]
    add(bench, requests)
    assert [len(c.token_ids) for c in bench.step().chunks] == [9, 9]
    bench.run()
    assert_answers(bench, requests)


def test_kv_is_received_once_for_the_group() -> None:
    bench = Bench(32)
    requests = group(3, range(10), work=Work.RECEIVE)
    add(bench, requests)
    bench.step()
    assert [signal.request_id for signal in bench.reserved] == ["c0"]
    payload, sampled = remote_prefill(requests[0])
    bench.commit("c0", 0, payload)
    bench.step()
    bench.scheduler.handover.finish_receive("c0", sampled, 0)
    assert {c.request_id for c in bench.step().chunks} == {"c0", "c1", "c2"}
    bench.run()
    assert len(bench.reserved) == 1
    assert_answers(bench, requests)
    reports = [bench.outputs[r.request_id][0].prefill for r in requests]
    assert reports == [
        PrefillReport(0, PrefillOutcome.REMOTE),
        PrefillReport(9, PrefillOutcome.LOCAL),
        PrefillReport(9, PrefillOutcome.LOCAL),
    ]


def test_a_failed_receive_is_computed_once_for_the_group() -> None:
    bench = Bench(32)
    requests = group(2, range(10), work=Work.RECEIVE)
    add(bench, requests)
    bench.step()
    bench.scheduler.handover.fail_receive("c0")
    assert [c.request_id for c in bench.step().chunks] == ["c0"]
    bench.run()
    assert_answers(bench, requests)


def test_replayed_members_share_the_prompt_and_compute_their_own_output() -> None:
    bench = Bench(32, prefix_caching=False)
    requests = [
        make_request("c0", range(10), 6, group="g", output_ids=(3, 4)),
        make_request("c1", range(10), 6, group="g", output_ids=(5, 6, 7)),
    ]
    add(bench, requests)
    assert [len(c.token_ids) for c in bench.step().chunks] == [12]
    second = bench.step()
    assert {c.request_id: len(c.token_ids) for c in second.chunks} == {"c0": 1, "c1": 3}
    assert len(second.copies) == 1
    bench.run()
    assert_answers(bench, requests)


def test_a_preempted_member_borrows_again() -> None:
    bench = Bench(7, prefix_caching=False)
    requests = group(3, range(6), max_tokens=8)
    add(bench, requests)
    bench.run()
    assert bench.scheduler.load().preemptions > 0
    assert_answers(bench, requests)


def test_a_copy_is_made_before_its_source_is_written_on() -> None:
    """The lender writes its next token to the very block that is copied in that step."""
    bench = Bench(8)
    add(bench, group(2, range(6)))
    bench.step()
    plan = bench.step()
    lender = plan.chunks[0]
    assert plan.copies == (BlockCopy(lender.block_table[1], plan.chunks[1].block_table[1]),)
    assert lender.start // BLOCK_SIZE == 1
