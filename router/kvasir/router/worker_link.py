"""One worker's Session: a long-lived stream, opened again whenever it breaks.

Owns the channel, the stream and the queues of the requests that run over it. Everything
that is not a request's output goes to the ``LinkListener``.

Invariants
- A request's queue ends with the output that carries ``finish_reason``, or with
  ``Ending.LOST``. The last token and its finish come in one SequenceOutput by contract, so
  a loss never falls between them, and a replay never draws a token past the end.
- After a break nothing of the old stream is delivered, and every request is told.
- A peer that stopped answering while TCP stays open is found by HTTP/2 keepalive pings
  (KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT), one that answers pings but says nothing by the
  absence of its load reports.

Must not: choose workers, or know what a prompt is.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import grpc

from kvasir.proto.errors import Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import engine_pb2_grpc as rpc

log = logging.getLogger("kvasir.router")

KEEPALIVE_SECONDS = 4
KEEPALIVE_TIMEOUT = 4
OPEN_TIMEOUT = 5.0
"""From connecting to the worker's Opened."""
SUSPECT_SECONDS = 3.5
"""Load reports come every second; after this long without a word a worker is not chosen."""
LOST_SECONDS = 30.0
"""After this long without a word the stream is given up, although the peer answers pings:
generous, because one step of a large prefill on a slow machine takes seconds."""
BACKOFF_FIRST = 0.1
BACKOFF_MAX = 2.0

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT * 1000),
    # Applies to every ping: while a bandwidth probe is unanswered no keepalive ping is sent.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024**2),
    # A fresh connection for each attempt: a shared one would bring its own back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


class Ending(Enum):
    """How a request's queue ends without a finish from the worker."""

    LOST = auto()
    """The session broke: nothing more comes from this worker."""


OutputQueue = asyncio.Queue[pb.SequenceOutput | Ending]


_SessionCall = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]


class LinkListener(Protocol):
    """Told what a worker says apart from outputs. Called on the event loop; must not block."""

    def objection(self, link: "WorkerLink", info: pb.WorkerInfo) -> str | None:
        """Why no session with this worker is wanted; None if it is welcome."""
        ...

    def opened(self, link: "WorkerLink", info: pb.WorkerInfo) -> None:
        """A session is open."""
        ...

    def closed(self, link: "WorkerLink") -> None:
        """The session broke. Its requests have been told."""
        ...

    def said(self, link: "WorkerLink", message: pb.WorkerMessage) -> None:
        """KV events, a snapshot part or a load report."""
        ...


class _SessionFailedError(Exception):
    """The worker does not hold a session with us; the text says why."""


class WorkerLink:
    """The session with one worker address. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        router_id: str,
        listener: LinkListener,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.last_heard = clock()
        self._router_id = router_id
        self._listener = listener
        self._clock = clock
        self._rng = rng
        self._queues: dict[str, OutputQueue] = {}
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._stub: rpc.EngineAsyncStub | None = None
        self._abort_session: Callable[[], bool] | None = None
        self._retiring = False
        self._complaint = ""
        self._task: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._stub is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-{self.worker_id}")
        self._task.add_done_callback(report_crash)

    async def retire(self) -> None:
        """Close once the last request is over; do not connect again."""
        self._retiring = True
        self._stop_if_idle()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Close now; requests still running are told that they are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def give_up(self) -> None:
        """Break the session of a worker that says nothing; connect again."""
        if self._abort_session is not None:
            self._abort_session()

    def _stop_if_idle(self) -> None:
        if self._retiring and not self._queues and self._task is not None:
            self._task.cancel()

    # --- requests --------------------------------------------------------------------------

    def submit(self, submit: pb.Submit) -> OutputQueue:
        """Send a request. Its outputs, or Ending.LOST, come through the queue."""
        queue: OutputQueue = asyncio.Queue()
        if self._stub is None:
            queue.put_nowait(Ending.LOST)
            return queue
        if submit.request_id in self._queues:
            raise ValueError(f"request {submit.request_id} is already running")
        self._queues[submit.request_id] = queue
        self._outgoing.put_nowait(pb.RouterMessage(submit=submit))
        return queue

    def leave(self, request_id: str, *, abort: bool) -> None:
        """No one reads the request's queue any longer; ``abort`` if the worker still runs it."""
        if self._queues.pop(request_id, None) is not None and abort and self.is_open:
            self._outgoing.put_nowait(pb.RouterMessage(abort=pb.Abort(request_id=request_id)))
        self._stop_if_idle()

    def request_snapshot(self) -> None:
        self._outgoing.put_nowait(pb.RouterMessage(snapshot_request=pb.SnapshotRequest()))

    async def fetch_tokenizer(self) -> dict[str, bytes] | None:
        """File name to content; None if the worker cannot be asked now."""
        if self._stub is None:
            return None
        files: dict[str, bytearray] = {}
        try:
            async for chunk in self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=60):
                files.setdefault(chunk.name, bytearray()).extend(chunk.data)
        except grpc.aio.AioRpcError as error:
            log.warning("no tokenizer worker=%s reason=%s", self.worker_id, error.details())
            return None
        return {name: bytes(data) for name, data in files.items()}

    # --- the session -----------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                failures = 0 if await self._hold_session() else failures + 1
            finally:
                self._lose_all()
            if self._retiring:
                return
            longest = min(BACKOFF_FIRST * 2**failures, BACKOFF_MAX)
            await asyncio.sleep(longest * self._rng.uniform(0.5, 1.0))

    async def _hold_session(self) -> bool:
        """One session from connect to break. Whether it was ever open."""
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            stub = rpc.EngineStub(channel)
            call = stub.Session()
            self._outgoing = asyncio.Queue()
            writer = asyncio.create_task(self._write(call), name=f"write-{self.worker_id}")
            # A session that is only heard would take requests and never send them.
            writer.add_done_callback(lambda _: call.cancel())
            writer.add_done_callback(report_crash)
            try:
                await self._open(call, stub)
                while (message := await _read(call)) is not None:
                    self._deliver(message)
                raise _SessionFailedError("the worker ended the session")
            except (grpc.aio.AioRpcError, _SessionFailedError, TimeoutError) as error:
                self._complain(error)
            except asyncio.CancelledError:
                # A call cancelled by us surfaces here as if the task were cancelled.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                why = "nothing can be sent" if writer.done() else "nothing was heard for too long"
                self._complain(_SessionFailedError(why))
            finally:
                self._abort_session = None
                call.cancel()
                writer.cancel()
                await asyncio.wait([writer])
        return self.is_open

    async def _open(self, call: _SessionCall, stub: "rpc.EngineAsyncStub") -> None:
        hello = pb.Hello(router_id=self._router_id)
        self._outgoing.put_nowait(pb.RouterMessage(hello=hello))
        async with asyncio.timeout(OPEN_TIMEOUT):
            first = await _read(call)
        if first is None or not first.HasField("opened"):
            raise _SessionFailedError("the worker's first message is not Opened")
        if first.opened.HasField("refusal"):
            refusal = Refusal.from_proto(first.opened.refusal)
            raise _SessionFailedError(f"session refused: {refusal.message}")
        objection = self._listener.objection(self, first.opened.info)
        if objection is not None:
            raise _SessionFailedError(objection)
        self._stub, self._abort_session = stub, call.cancel
        self.last_heard = self._clock()
        self._complaint = ""
        self._listener.opened(self, first.opened.info)
        log.info("worker connected worker=%s address=%s", self.worker_id, self.address)

    async def _write(self, call: _SessionCall) -> None:
        outgoing = self._outgoing
        try:
            while True:
                await call.write(await outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over; the reader learns why

    def _deliver(self, message: pb.WorkerMessage) -> None:
        self.last_heard = self._clock()
        if not message.HasField("step"):
            self._listener.said(self, message)
            return
        for output in message.step.outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:  # None: aborted, and the output crossed the abort
                queue.put_nowait(output)

    def _lose_all(self) -> None:
        was_open, self._stub = self.is_open, None
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.put_nowait(Ending.LOST)
        if was_open:
            self._listener.closed(self)

    def _complain(self, error: Exception) -> None:
        """Once for each new reason: reconnects are frequent."""
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        reason = details or type(error).__name__
        if reason != self._complaint:
            self._complaint = reason
            log.warning("no session worker=%s reason=%s", self.worker_id, reason)


def report_crash(task: asyncio.Task[None]) -> None:
    """For tasks that nobody awaits: a bug in one of them must not pass in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("internal error, task ended task=%s", task.get_name(), exc_info=error)


async def _read(call: _SessionCall) -> pb.WorkerMessage | None:
    """The next message; None at the end of the stream."""
    message = await call.read()
    return message if isinstance(message, pb.WorkerMessage) else None
