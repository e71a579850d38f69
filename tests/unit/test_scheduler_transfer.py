"""The scheduler where prompts are computed for other workers, and received from them."""

import pytest

from helpers.engine_workload import BLOCK_SIZE, Bench, make_request, remote_prefill
from helpers.scheduler_steps import expected, first_token, sizes, steps
from kvasir.proto.blocks import block_hashes
from kvasir.worker.contracts import (
    Finish,
    KvUsage,
    Load,
    PrefillOutcome,
    PrefillReport,
    Request,
    Sampled,
    Work,
)
from kvasir.worker.signals import Progress, Reserved


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
