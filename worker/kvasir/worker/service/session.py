"""One router's session: its requests in, their outputs out.

A session owns the requests that came over it, and no other. They are aborted when it ends,
however it ends. Everything here runs on the event loop, except the methods by which
the engine's thread reaches a session (``_Sink``), which only post to the bridge.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvasir.proto.blocks import HASH_BYTES
from kvasir.proto.errors import Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import Output, Request, Work
from kvasir.worker.engine import Engine
from kvasir.worker.metrics import WorkerMetrics
from kvasir.worker.service.bridge import LoopBridge
from kvasir.worker.service.convert import output_proto, refused_proto
from kvasir.worker.service.outbound import Outbound
from kvasir.worker.service.requests import Limits, Peer, read_peer, read_submit
from kvasir.worker.transfer.receiver import Receiver, worth_pulling

_SNAPSHOT_HASHES = (1 << 20) // (HASH_BYTES + 2)
"""Hashes in one message of a snapshot: about 1 MiB."""

_log = logging.getLogger("kvasir.worker.session")


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions of a worker share."""

    engine: Engine
    bridge: LoopBridge
    receiver: Receiver
    metrics: WorkerMetrics
    limits: Limits
    epoch: str
    max_queued_bytes: int


@dataclass(slots=True)
class _Live:
    """A request between Submit and its last output."""

    request: Request
    peer: Peer | None
    submitted: float
    last_output: float | None = None
    pull: asyncio.Task[None] | None = None


class SlowRouterError(Exception):
    """The router does not read what it has asked for."""


class Session:
    def __init__(self, context: SessionContext, router_id: str) -> None:
        self._context = context
        self._router_id = router_id
        self._live: dict[str, _Live] = {}
        self._outbound = Outbound(context.max_queued_bytes)
        self._sink = _Sink(self, context.bridge)
        self._snapshot_pending = False
        self._finished = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether every request has ended and its last output has been sent."""
        return not self._live and self._outbound.idle

    async def run(
        self,
        messages: AsyncIterator[pb.RouterMessage],
        send: Callable[[pb.WorkerMessage], Awaitable[None]],
    ) -> None:
        """Serve until the router leaves or ``finish`` is called.

        Raises:
            SlowRouterError: more than ``max_queued_bytes`` wait to be sent.
        """
        ends = (
            asyncio.create_task(self._receive(messages)),
            asyncio.create_task(self._send(send)),
            asyncio.create_task(self._outbound.overflowed.wait()),
            asyncio.create_task(self._finished.wait()),
        )
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._abort_all()
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        if self._outbound.overflowed.is_set():
            raise SlowRouterError(self._router_id)

    def finish(self) -> None:
        """End the session in good order, at shutdown."""
        self._finished.set()

    def put(self, message: pb.WorkerMessage) -> None:
        self._outbound.put(message)

    def put_load(self, message: pb.WorkerMessage) -> None:
        self._outbound.put_load(message)

    # --- up ----------------------------------------------------------------------------------

    async def _receive(self, messages: AsyncIterator[pb.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    self._submit(message.submit)
                case "abort":
                    self._abort(message.abort.request_id)
                case "snapshot_request":
                    self._request_snapshot()
                case kind:
                    # A newer router's message, or a second Hello: nothing depends on it.
                    _log.warning(
                        "ignored a message kind=%s router=%s", kind or "unknown", self._router_id
                    )

    async def _send(self, send: Callable[[pb.WorkerMessage], Awaitable[None]]) -> None:
        while True:
            await send(await self._outbound.take())

    def _submit(self, message: pb.Submit) -> None:
        accepted = self._read(message)
        if isinstance(accepted, Refusal):
            self._refuse(message.request_id, accepted)
            return
        request, peer = accepted
        refusal = self._context.engine.submit(request, self._sink)
        if refusal is not None:
            self._refuse(request.request_id, refusal)
            return
        self._live[request.request_id] = _Live(request, peer, time.monotonic())

    def _read(self, message: pb.Submit) -> tuple[Request, Peer | None] | Refusal:
        request = read_submit(message, self._context.limits)
        if isinstance(request, Refusal) or not message.HasField("prefill"):
            return request if isinstance(request, Refusal) else (request, None)
        peer = read_peer(message.prefill)
        if isinstance(peer, Refusal):
            return peer
        if peer.epoch == self._context.epoch:  # nothing to fetch from oneself
            return request, None
        return replace(request, work=Work.RECEIVE), peer

    def _refuse(self, request_id: str, refusal: Refusal) -> None:
        self._put_outputs([refused_proto(request_id, refusal)])

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            _stop_pull(live)
            self._context.engine.abort(request_id)

    def _abort_all(self) -> None:
        live, self._live = self._live, {}
        for request_id, one in live.items():
            _stop_pull(one)
            self._context.engine.abort(request_id)
        if live:
            _log.info("aborted requests=%d router=%s", len(live), self._router_id)

    def _request_snapshot(self) -> None:
        if self._snapshot_pending:
            return  # the one that is to be sent will do: all later events come after it
        self._snapshot_pending = True
        self._context.engine.snapshot(self._sink.snapshot)

    # --- down --------------------------------------------------------------------------------

    def on_outputs(self, outputs: Sequence[Output], now: float) -> None:
        """All news of one step. ``now``: when the step ended, monotonic seconds."""
        known = [output for output in outputs if output.request_id in self._live]
        if known:
            self._put_outputs([self._take_output(output, now) for output in known])

    def on_reserved(self, request_id: str, num_cached_tokens: int) -> None:
        live = self._live.get(request_id)
        if live is None or live.peer is None:
            return  # aborted in the meantime; the engine is told of that too
        request = live.request
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        if not worth_pulling(num_tokens, num_cached_tokens, self._context.limits.block_size):
            self._context.engine.fail_receive(request_id)
            return
        live.pull = asyncio.create_task(
            self._context.receiver.receive(request, live.peer, num_cached_tokens)
        )
        live.pull.add_done_callback(_log_failure)

    def _take_output(self, output: Output, now: float) -> pb.SequenceOutput:
        live = self._live[output.request_id]
        self._observe(live, output, now)
        if output.finish is not None:
            _stop_pull(live)
            del self._live[output.request_id]
        message = output_proto(output, live.peer.worker_id if live.peer else "")
        if output.prefill is not None and live.pull is None:
            # Too little was missing to ask for: that is no failed transfer.
            message.prefill.outcome = pb.PREFILL_OUTCOME_LOCAL
            message.prefill.prefill_worker_id = ""
        return message

    def _observe(self, live: _Live, output: Output, now: float) -> None:
        """A beam search gives all its tokens at the end: these are no first ones."""
        metrics = self._context.metrics
        metrics.generated(len(output.token_ids) + sum(len(h.token_ids) for h in output.hypotheses))
        if output.token_ids:
            if live.last_output is None:
                metrics.first_output(now - live.submitted)
            else:
                metrics.next_output(now - live.last_output)
            live.last_output = now

    def on_snapshot(self, sequence: int, hashes: Sequence[bytes]) -> None:
        self._outbound.put_parts(self._snapshot_parts(sequence, hashes))

    def _snapshot_parts(self, sequence: int, hashes: Sequence[bytes]) -> Iterator[pb.WorkerMessage]:
        self._snapshot_pending = False
        starts = range(0, max(len(hashes), 1), _SNAPSHOT_HASHES)
        for start in starts:
            last = start == starts[-1]
            part = pb.KvSnapshot(
                sequence=sequence, block_hashes=hashes[start : start + _SNAPSHOT_HASHES], last=last
            )
            yield pb.WorkerMessage(kv_snapshot=part)

    def _put_outputs(self, outputs: Sequence[pb.SequenceOutput]) -> None:
        self._outbound.put(pb.WorkerMessage(step=pb.StepBatch(outputs=outputs)))


class _Sink:
    """The engine thread's door to one session; a ReceiveSink."""

    def __init__(self, session: Session, bridge: LoopBridge) -> None:
        self._session = session
        self._bridge = bridge

    def deliver(self, outputs: Sequence[Output]) -> None:
        self._bridge.post(self._session.on_outputs, outputs, time.monotonic())

    def reserved(self, request_id: str, num_cached_tokens: int) -> None:
        self._bridge.post(self._session.on_reserved, request_id, num_cached_tokens)

    def snapshot(self, sequence: int, hashes: Sequence[bytes]) -> None:
        """Over the bridge, like the KV events, among which it has its place."""
        self._bridge.post(self._session.on_snapshot, sequence, hashes)


def _stop_pull(live: _Live) -> None:
    if live.pull is not None:
        live.pull.cancel()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a KV transfer failed on this side", exc_info=error)
