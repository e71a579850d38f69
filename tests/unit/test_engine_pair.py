"""Two engines: what one computes, the other receives."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from helpers.engine_rig import Rig, expected, rigs
from helpers.engine_workload import BLOCK_SIZE, make_request
from helpers.recorders import WAIT_SECONDS, Recorder
from kvasir.worker.contracts import Finish, PrefillOutcome, Request, Sampled, Work


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with rigs() as make:
        yield make


# --- two engines -------------------------------------------------------------------------------


class Pump:
    """Carries KV from a holder to a receiver as a transfer service would, on threads of its own."""

    def __init__(
        self, holder: Rig, receiver: Rig, *, break_after_blocks: int | None = None
    ) -> None:
        self.holder = holder
        self.receiver = receiver
        self.break_after = break_after_blocks
        self.threads = ThreadPoolExecutor(8)
        self.requests: dict[str, Request] = {}
        self.sink = Recorder(on_reserved=self._on_reserved)
        self.holding = Recorder()

    def submit(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.receiver.submit(replace(request, work=Work.RECEIVE), self.sink)

    def close(self) -> None:
        self.threads.shutdown()

    def _on_reserved(self, request_id: str, num_cached_tokens: int) -> None:
        self.threads.submit(self._transfer, request_id, num_cached_tokens)

    def _transfer(self, request_id: str, cached: int) -> None:
        request = replace(self.requests[request_id], work=Work.PREFILL, skip_tokens=cached)
        self.holder.submit(request, self.holding)
        sent, total = cached // BLOCK_SIZE, len(request.prompt_ids) + len(request.output_ids)
        stop = -(-total // BLOCK_SIZE)
        while sent < stop:
            self._wait_ready(request_id, total, sent)
            if self.break_after is not None and sent - cached // BLOCK_SIZE >= self.break_after:
                self.receiver.engine.fail_receive(request_id)
                self.holder.engine.release(request_id)
                return
            payload = self.holder.engine.read_blocks(request_id, sent, 1).result(WAIT_SECONDS)
            assert payload is not None
            committed = self.receiver.engine.commit_blocks(request_id, sent, payload)
            if not committed.result(WAIT_SECONDS):
                self.holder.engine.release(request_id)
                return
            sent += 1
        self.holding.wait_finished(request_id)
        output = self.holding.outputs(request_id)[-1]
        assert output.prefill is not None
        self.receiver.engine.finish_receive(
            request_id, Sampled(output.token_ids[0]), max(output.prefill.cached_tokens - cached, 0)
        )
        self.holder.engine.release(request_id)

    def _wait_ready(self, request_id: str, total: int, block: int) -> None:
        self.holding.wait(lambda: self._ready(request_id, total) > block)

    def _ready(self, request_id: str, total: int) -> int:
        """Blocks that can be sent: full ones, and the last one when all is computed."""
        told = [tokens for name, tokens in self.holding.progressed if name == request_id]
        computed = max(told, default=0)
        return -(-total // BLOCK_SIZE) if computed == total else computed // BLOCK_SIZE


@pytest.mark.parametrize("break_after", [None, 0, 1, 2])
def test_two_engines_give_the_answers_of_one(
    make_rig: Callable[..., Rig], break_after: int | None
) -> None:
    holder = make_rig(num_blocks=24, max_batched_tokens=6)
    receiver = make_rig(num_blocks=16, max_batched_tokens=16)
    pump = Pump(holder, receiver, break_after_blocks=break_after)
    requests = [
        make_request(f"r{i}", [1] * 8 + [i] * (1 + i % 7), 2 + i % 9, output_ids=(3,) * (i % 2))
        for i in range(12)
    ]
    for request in requests:
        pump.submit(request)
    pump.sink.wait_finished(*(request.request_id for request in requests))
    pump.close()
    for request in requests:
        assert pump.sink.tokens(request.request_id) == expected(request)
    outcomes = {
        output.prefill.outcome
        for request in requests
        for output in pump.sink.outputs(request.request_id)
        if output.prefill is not None
    }
    assert (
        PrefillOutcome.RECOMPUTED if break_after == 0 else PrefillOutcome.REMOTE
    ) in outcomes or (break_after is not None)
    assert PrefillOutcome.LOCAL not in outcomes
    assert (PrefillOutcome.RECOMPUTED in outcomes) == (break_after is not None)
    holder.settle()
    receiver.settle()


def test_an_abort_during_a_transfer_frees_both_sides(make_rig: Callable[..., Rig]) -> None:
    holder, receiver = make_rig(max_batched_tokens=4), make_rig()
    pump = Pump(holder, receiver)
    holder.runner.gate.clear()
    pump.submit(make_request("r", range(30), 5))
    assert holder.runner.entered.wait(WAIT_SECONDS)
    receiver.engine.abort("r")
    receiver.settle()
    holder.runner.gate.set()
    pump.close()
    holder.settle()
    assert pump.sink.finish("r") is Finish.ABORTED
