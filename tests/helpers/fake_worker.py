"""A worker without a model: a real gRPC server that speaks Engine, with scripted behavior.

Its behavior and its answers are those of a Script; see fake_script.py.

    worker = FakeWorker("w0")
    await worker.start()
    worker.address, worker.submits, worker.aborts ...
    await worker.kill()       # streams break at once, as in a crash
    await worker.start()      # same port, new epoch, empty cache
    await worker.stop()

``python -m helpers.fake_worker --id w0`` runs one as a process and prints its address.
"""

# ruff: noqa: N802, ARG002 - names and arguments of RPC methods are gRPC's

import argparse
import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import grpc

from helpers.fake_engine import FakeEngine, RouterLink
from helpers.fake_script import Script
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import engine_pb2_grpc as rpc

_Context = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]


class FakeWorker(FakeEngine, rpc.EngineServicer):
    """One scripted worker. ``info`` may be changed before ``start``."""

    def __init__(
        self,
        worker_id: str = "w0",
        *,
        role: pb.Role.ValueType = pb.ROLE_BOTH,
        script: Script | None = None,
        cache_blocks: int = 4096,
        port: int = 0,
    ) -> None:
        super().__init__(worker_id, role, script or Script(), cache_blocks)
        self.port = port
        self.aborts: list[str] = []
        self.snapshot_requests = 0
        self.tokenizer_requests = 0
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        """Serve, with a new epoch and an empty cache; again on the same port after a kill."""
        self.info.epoch = str(uuid.uuid4())
        self.forget()
        self._server = grpc.aio.server()
        rpc.add_EngineServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        self._tasks = [asyncio.create_task(self._steps()), asyncio.create_task(self._reports())]

    async def kill(self) -> None:
        """Break every stream at once. ``running`` is false when all is down."""
        if self._server is None:
            return
        await self._server.stop(None)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.live.clear()
        self._server = None

    stop = kill

    async def _reports(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(self.script.report_seconds)

    async def _steps(self) -> None:
        while True:
            await self.work.wait()
            await asyncio.sleep(self.script.step_seconds)
            self.step()
            if not self.live:
                self.work.clear()
            dying = self.script.die_after_tokens
            if dying is not None and self.tokens_given >= dying:
                self.script.die_after_tokens = None
                await asyncio.sleep(0.02)  # lets what was sent reach the wire
                await self.kill()
                return

    # --- Engine ----------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: _Context
    ) -> AsyncIterator[pb.WorkerMessage]:
        session = RouterLink()
        hello = await anext(request_iterator)
        if not hello.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield pb.WorkerMessage(opened=pb.Opened(info=self.info))
            self.sessions.add(session)
            while True:
                yield await session.outgoing.get()
        finally:
            self.sessions.discard(session)
            reader.cancel()
            for request_id in [k for k, r in self.live.items() if r.session is session]:
                del self.live[request_id]

    async def _read(self, session: RouterLink, messages: AsyncIterator[pb.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    self.submit(message.submit, session)
                case "abort":
                    self.aborts.append(message.abort.request_id)
                    self.live.pop(message.abort.request_id, None)
                case "snapshot_request":
                    self.snapshot_requests += 1
                    self.send_snapshot(session)

    async def GetInfo(self, request: pb.GetInfoRequest, context: object) -> pb.WorkerInfo:
        return self.info

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> AsyncIterator[pb.TokenizerChunk]:
        self.tokenizer_requests += 1
        for name, data in self.script.tokenizer_files.items():
            for start in range(0, len(data), 1 << 20):
                yield pb.TokenizerChunk(name=name, data=data[start : start + (1 << 20)])

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainStatus:
        self.info.draining = True
        self.report()
        return self.drain_status()

    async def Undrain(self, request: pb.UndrainRequest, context: object) -> pb.DrainStatus:
        self.info.draining = False
        self.report()
        return self.drain_status()

    async def SetRole(self, request: pb.SetRoleRequest, context: object) -> pb.WorkerInfo:
        self.info.role = request.role
        self.report()
        return self.info


async def _serve(worker: FakeWorker) -> None:
    await worker.start()
    print(worker.address, flush=True)  # noqa: T201 - the parent reads the address
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run one fake worker until it is stopped.")
    parser.add_argument("--id", default="w0")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(_serve(FakeWorker(options.id, script=Script(step_seconds=options.step_seconds))))
