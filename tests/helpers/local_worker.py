"""Whole workers inside the test's process: real engine, real gRPC servers, no model.

Their answers come from ``FakeRunner``, so each depends on every byte of KV that it should,
and ``expected_tokens`` says what they must be.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from helpers.fake_runner import FakeRunner
from kvasir.proto.process import join_host_port
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1.engine_pb2_grpc import EngineStub
from kvasir.worker.config import WorkerConfig
from kvasir.worker.service.server import WorkerServer

if TYPE_CHECKING:
    from kvasir.proto.v1.engine_pb2_grpc import EngineAsyncStub

BLOCK_SIZE = 4
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 400


@dataclass(frozen=True)
class FakeModel:
    """A ServedModel without weights."""

    runner: FakeRunner
    layout: pb.KvLayout
    weight_bytes: int = 0
    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()
    max_model_len: int = MAX_MODEL_LEN
    tokenizer_files: Mapping[str, bytes] = field(
        default_factory=lambda: {
            "tokenizer.json": bytes(range(256)) * 3000,
            "chat_template.jinja": b"",
            "tokenizer_config.json": b"{}",
        }
    )


class LocalWorker:
    """A started worker and a channel to it."""

    def __init__(self, server: WorkerServer, model: FakeModel, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.model = model
        self.channel = channel
        self.stub = EngineStub(channel)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def epoch(self) -> str:
        return self.server.identity.epoch

    def peer(self, address: str = "", epoch: str = "") -> pb.PrefillPeer:
        """This worker as a prefill peer, perhaps under another address or epoch."""
        return pb.PrefillPeer(
            worker_id=self.server.identity.info().worker_id,
            address=address or self.address,
            epoch=epoch or self.epoch,
        )

    def metric(self, name: str, **labels: str) -> float:
        value = self.server.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    def transfers(self) -> dict[str, float]:
        """Transfers received so far, by outcome, those that happened."""
        found = {}
        for family in self.server.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "kvasir_kv_transfer_total" and sample.value:
                    found[sample.labels["outcome"]] = sample.value
        return found

    async def settled(self) -> None:
        """Wait until no request, lease or used block is left."""
        await eventually(
            lambda: (
                self.server.engine.load().kv_blocks_used == 0
                and self.server.engine.load().running == 0
                and self.server.engine.load().waiting == 0
                and self.server.holder.leases == 0
            )
        )


@asynccontextmanager
async def local_worker(
    *,
    worker_id: str = "w",
    max_session_bytes: int = 1 << 24,
    layout: pb.KvLayout | None = None,
    runner: FakeRunner | None = None,
    **settings: object,
) -> AsyncIterator[LocalWorker]:
    """A worker with small chunks, so that a prompt of 100 tokens takes several steps."""
    values: dict[str, object] = {
        "worker_id": worker_id,
        "block_size": BLOCK_SIZE,
        "max_batched_tokens": 16,
        **settings,
    }
    config = WorkerConfig.model_validate(values)
    default_layout = pb.KvLayout(model_fingerprint="fake", dtype="u8", block_size=BLOCK_SIZE)
    model = FakeModel(
        runner or FakeRunner(num_blocks=256, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE),
        layout or default_layout,
    )
    fatal: list[BaseException] = []
    server = WorkerServer(
        config,
        model,
        str(uuid.uuid4()),
        on_fatal=fatal.append,
        max_session_bytes=max_session_bytes,
    )
    await server.start()
    channel = grpc.aio.insecure_channel(join_host_port(config.host, server.port))
    try:
        yield LocalWorker(server, model, channel)
    finally:
        await channel.close()
        await server.stop()
    assert not fatal, f"the engine failed: {fatal}"


class RouterSession:
    """The router's end of a session; sorts what comes down."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]) -> None:
        self.call = call
        self.opened: pb.Opened | None = None
        self.outputs: dict[str, list[pb.SequenceOutput]] = {}
        self.loads: list[pb.LoadReport] = []
        self.events: list[pb.KvEventBatch] = []
        self.snapshots: list[pb.KvSnapshot] = []
        self.order: list[str] = []
        self._changed = asyncio.Condition()

    async def send(self, **kind: pb.Submit | pb.Abort | pb.SnapshotRequest | pb.Hello) -> None:
        await self.call.write(pb.RouterMessage(**kind))  # type: ignore[arg-type]  # one of them

    async def read_all(self) -> None:
        """Read until the stream ends; run as a task."""
        while isinstance(message := await self.call.read(), pb.WorkerMessage):
            async with self._changed:
                self._take(message)
                self._changed.notify_all()

    def _take(self, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        self.order.append(str(kind))
        match kind:
            case "opened":
                self.opened = message.opened
            case "step":
                for output in message.step.outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
            case "load":
                self.loads.append(message.load)
            case "kv_events":
                self.events.append(message.kv_events)
            case "kv_snapshot":
                self.snapshots.append(message.kv_snapshot)

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(predicate)

    async def finished(self, request_id: str) -> list[pb.SequenceOutput]:
        """All outputs of a request, when it has ended."""

        def ended() -> bool:
            outputs = self.outputs.get(request_id, [])
            return bool(outputs) and bool(outputs[-1].finish_reason)

        await self.until(ended)
        return self.outputs[request_id]


@asynccontextmanager
async def router_session(
    stub: "EngineAsyncStub", expected_epoch: str = ""
) -> AsyncIterator[RouterSession]:
    call = stub.Session()
    session = RouterSession(call)
    await session.send(hello=pb.Hello(router_id="test", expected_epoch=expected_epoch))
    reading = asyncio.create_task(session.read_all())
    try:
        await session.until(lambda: session.opened is not None)
        yield session
    finally:
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def make_submit(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    prefill: pb.PrefillPeer | None = None,
    **sampling: float,
) -> pb.Submit:
    values = {
        "top_p": 1,
        "repetition_penalty": 1,
        "max_tokens": max_tokens,
        "logprobs": -1,
        "prompt_logprobs": -1,
        **sampling,
    }
    return pb.Submit(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=pb.SamplingParams(**values),  # type: ignore[arg-type]  # ints and floats by name
        prefill=prefill,
    )


def token_ids(outputs: list[pb.SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def eventually(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not predicate():  # whatever it is, it has no event
            await asyncio.sleep(0.01)
