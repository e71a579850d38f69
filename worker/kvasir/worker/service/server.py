"""A worker's engine and servers as one thing: built, started, drained, stopped.

Everything but the engine's thread runs on the event loop of ``start``. The engine is
stopped before the loop is, because it posts to it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Protocol

import grpc

from kvasir.proto.process import join_host_port
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.config import WorkerConfig
from kvasir.worker.engine import Engine
from kvasir.worker.limits import Servable, scheduler_config
from kvasir.worker.metrics import CacheConfig, Memory, WorkerMetrics
from kvasir.worker.scheduler import Scheduler
from kvasir.worker.service.bridge import LoopBridge
from kvasir.worker.service.engine_service import EngineService
from kvasir.worker.service.hub import LOAD_INTERVAL, SessionHub
from kvasir.worker.service.identity import WorkerIdentity, tokenizer_hash
from kvasir.worker.service.requests import Limits
from kvasir.worker.service.session import SessionContext
from kvasir.worker.transfer.holder import Holder
from kvasir.worker.transfer.layout import Identity, max_frame_bytes
from kvasir.worker.transfer.peers import KEEPALIVE_OPTIONS, Peers
from kvasir.worker.transfer.receiver import Receiver, Timeouts

MAX_SESSION_BYTES = 64 * 1024**2
"""What one router may leave unread before its session is ended."""

_STOP_GRACE = 2.0
_DRAIN_POLL = 0.05
_ROLES: Mapping[str, pb.Role.ValueType] = {
    "prefill": pb.ROLE_PREFILL,
    "decode": pb.ROLE_DECODE,
    "both": pb.ROLE_BOTH,
}

_log = logging.getLogger("kvasir.worker.service")


class ServedModel(Servable, Protocol):
    """What the service needs to know of a loaded model."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layout(self) -> pb.KvLayout: ...
    @property
    def tokenizer_files(self) -> Mapping[str, bytes]: ...


class ListenError(Exception):
    """The gRPC address cannot be had."""


class WorkerServer:
    """Construct it on a running event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        model: ServedModel,
        epoch: str,
        *,
        on_fatal: Callable[[BaseException], None],
        max_session_bytes: int = MAX_SESSION_BYTES,
    ) -> None:
        self._config = config
        self._model = model
        bridge = LoopBridge()
        self.identity = WorkerIdentity(_worker_info(config, model, epoch))
        self._hub = SessionHub(bridge, self.identity)
        scheduler = Scheduler(scheduler_config(config, model))
        self.engine = Engine(scheduler, model.runner, self._hub, on_fatal=on_fatal)
        cache = CacheConfig(config.block_size, model.runner.num_blocks, config.prefix_caching)
        memory = Memory(model.weight_bytes, model.runner.num_blocks * model.runner.block_bytes)
        self.metrics = WorkerMetrics(config.served_name, cache, memory, self.engine.load)
        limits = Limits(
            model.vocab_size, model.max_model_len, config.block_size, model.eos_token_ids
        )
        transfer = Identity(epoch, model.layout, model.runner.block_bytes, model.vocab_size)
        self._peers = Peers(max_frame_bytes(model.runner.block_bytes))
        receiver = Receiver(
            self.engine,
            self._peers,
            transfer,
            self.metrics,
            Timeouts(config.transfer_timeout, config.transfer_stall_timeout),
        )
        context = SessionContext(
            self.engine, bridge, receiver, self.metrics, limits, epoch, max_session_bytes
        )
        self._service = EngineService(context, self._hub, self.identity, model.tokenizer_files)
        self.holder = Holder(
            self.engine, bridge, transfer, limits, self.metrics, timeout=config.transfer_timeout
        )
        self._server = grpc.aio.server(options=_server_options(model.max_model_len))
        self._ticker: asyncio.Task[None] | None = None
        self.port = 0
        """gRPC port, from ``start`` on."""

    async def start(self) -> None:
        """Start the engine and listen.

        Raises:
            ListenError: the configured address cannot be had.
        """
        self._server.add_generic_rpc_handlers((self._service.handler(), self.holder.handler()))
        address = join_host_port(self._config.host, self._config.port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: choose another host or port") from error
        self.engine.start()
        await self._server.start()
        self._ticker = asyncio.create_task(self._tick())

    async def drain(self, deadline: float) -> None:
        """Refuse what is new and wait, at most ``deadline`` seconds, for what is accepted."""
        self._service.set_draining(True, terminating=True)
        try:
            async with asyncio.timeout(deadline):
                # Idleness is made of many parts, and no one of them knows of it.
                while not (self._hub.idle and self.holder.leases == 0):  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_POLL)
        except TimeoutError:
            load = self.engine.load()
            _log.warning(
                "drain deadline passed; the rest is aborted running=%d waiting=%d",
                *(load.running, load.waiting),
            )

    async def stop(self) -> None:
        """End sessions and transfers, then the engine. What still runs is aborted."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._hub.finish()
        await self._server.stop(_STOP_GRACE)
        await self._peers.close()
        await asyncio.to_thread(self.engine.stop)

    async def _tick(self) -> None:
        """Report the load every second while nothing else does."""
        while True:
            await asyncio.sleep(LOAD_INTERVAL)
            self._hub.report_if_quiet(self.engine.load())


def _worker_info(config: WorkerConfig, model: ServedModel, epoch: str) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=config.worker_id,
        epoch=epoch,
        role=_ROLES[config.role],
        model=config.served_name,
        revision=config.revision,
        layout=model.layout,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        tokenizer_hash=tokenizer_hash(model.tokenizer_files),
        kv_blocks_total=model.runner.num_blocks,
        version=version("kvasir"),
        max_running_requests=config.max_running_requests,
    )


def _server_options(max_model_len: int) -> list[tuple[str, int]]:
    """The longest message up is a prompt: at most 5 bytes a token, and its parameters."""
    return [
        *KEEPALIVE_OPTIONS,
        ("grpc.max_receive_message_length", 4 * 1024**2 + 16 * max_model_len),
        # Two processes on one port would each get half of the connections.
        ("grpc.so_reuseport", 0),
    ]
