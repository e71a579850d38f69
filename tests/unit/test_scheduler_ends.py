"""How requests end, what the scheduler refuses, aborts and deadlines."""

import pytest

from helpers.engine_workload import BLOCK_SIZE, Bench, make_request
from helpers.scheduler_steps import expected, first_token, sizes, steps
from kvasir.proto.errors import Reason
from kvasir.worker.block_pool import InvariantError
from kvasir.worker.contracts import Finish, KvUsage, Load, Output, Request, Work
from kvasir.worker.scheduler import SchedulerConfig


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
