"""What tests of the Engine service ask for, and runners that keep time."""

import threading
import time
from typing import Protocol

import grpc

from helpers.fake_runner import FakeRunner, expected_tokens
from helpers.local_worker import BLOCK_SIZE, VOCAB_SIZE
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Request, StepPlan, StepResult

PROMPT = [3 * i % VOCAB_SIZE for i in range(50)]


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return expected_tokens(Request("any", tuple(prompt), sampling), VOCAB_SIZE)


class SlowRunner(FakeRunner):
    """A step takes 5 ms, as a real one might."""

    def __init__(self) -> None:
        super().__init__(256, BLOCK_SIZE, VOCAB_SIZE)

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.005)
        return super().execute(plan)


class GatedRunner(FakeRunner):
    """No step ends before the gate is open."""

    def __init__(self) -> None:
        super().__init__(256, BLOCK_SIZE, VOCAB_SIZE)
        self.gate = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(60)
        return super().execute(plan)


class Readable(Protocol):
    async def read(self) -> object: ...


async def ending(call: Readable) -> grpc.StatusCode:
    """Read to the end, and say how it ended."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
