"""The prefill side of a transfer: compute a prompt and stream its KV as it is done.

The RPC is the lease. The engine holds the request's blocks from ``submit`` until
``release``, and ``release`` is called exactly once, however the RPC ends: completed,
cancelled, past its deadline or broken. A caller that does not read is held back by gRPC's
flow control, for at most ``timeout``.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import grpc

from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.v1 import kv_transfer_pb2 as pb
from kvasir.worker.contracts import Output, Request
from kvasir.worker.engine import Engine
from kvasir.worker.metrics import WorkerMetrics
from kvasir.worker.service.bridge import LoopBridge
from kvasir.worker.service.requests import Limits, read_prefill
from kvasir.worker.transfer.check import checksum
from kvasir.worker.transfer.frames import Frame, encode
from kvasir.worker.transfer.layout import Identity, blocks_per_frame, layout_mismatch, num_blocks
from kvasir.worker.transfer.peers import REFUSAL_METADATA, SERVICE

_READS_AHEAD = 4
"""Frames read from the cache before the first of them is sent: hides the engine's step time."""

_log = logging.getLogger("kvasir.worker.transfer")

Context = grpc.aio.ServicerContext[pb.PrefillRequest, Frame]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of one frame."""

    first_block: int
    count: int


def spans(first_block: int, end_block: int, per_frame: int) -> list[Span]:
    """Cut [first_block, end_block) into frames."""
    starts = range(first_block, end_block, per_frame)
    return [Span(start, min(per_frame, end_block - start)) for start in starts]


class Holder:
    """Serves ``KvTransfer.Prefill``."""

    def __init__(
        self,
        engine: Engine,
        bridge: LoopBridge,
        identity: Identity,
        limits: Limits,
        metrics: WorkerMetrics,
        *,
        timeout: float,
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._identity = identity
        self._limits = limits
        self._metrics = metrics
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self.leases = 0
        """Prefill calls in progress."""

    def handler(self) -> grpc.GenericRpcHandler:
        """For ``server.add_generic_rpc_handlers``; frames are encoded without protobuf."""
        method = grpc.unary_stream_rpc_method_handler(
            self.prefill,
            request_deserializer=pb.PrefillRequest.FromString,
            response_serializer=encode,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Prefill": method})

    async def prefill(self, message: pb.PrefillRequest, context: Context) -> None:
        """One transfer; see kv_transfer.proto."""
        refusal = await self._serve(message, context)
        if refusal is not None:
            _log.info(
                "prefill refused: %s reason=%s request=%s caller_epoch=%s",
                *(refusal.message, refusal.reason.name),
                *(message.request_id, message.receiver_epoch),
            )
            await context.abort(
                grpc.StatusCode[refusal.codes.grpc],
                refusal.message,
                trailing_metadata=((REFUSAL_METADATA, refusal.reason.name),),
            )

    async def _serve(self, message: pb.PrefillRequest, context: Context) -> Refusal | None:
        request = self._accept(message, _deadline(context))
        if isinstance(request, Refusal):
            return request
        hold = _Hold(self._bridge)
        refusal = self._engine.submit(request, hold)
        if refusal is not None:
            return refusal
        return await self._lend(request, hold, context)

    def _accept(self, message: pb.PrefillRequest, deadline: float | None) -> Request | Refusal:
        mismatch = layout_mismatch(self._identity.layout, message.layout)
        if mismatch is not None:
            return Refusal(Reason.LAYOUT_MISMATCH, f"KV layouts differ: {mismatch}")
        if message.expected_epoch != self._identity.epoch:
            return Refusal(
                Reason.EPOCH_MISMATCH,
                f"this is epoch {self._identity.epoch}, not {message.expected_epoch!r}",
            )
        request = read_prefill(message, self._limits, deadline)
        if isinstance(request, Refusal):
            return request
        # A receiver that restarts may ask anew before its old call is seen to have ended.
        unique_id = f"{request.request_id}/prefill-{next(self._numbers)}"
        return replace(request, request_id=unique_id)

    async def _lend(self, request: Request, hold: "_Hold", context: Context) -> Refusal | None:
        """Hold the blocks while they are sent; always ends the hold."""
        self.leases += 1
        try:
            async with asyncio.timeout(self._timeout):
                await context.send_initial_metadata(())
                return await self._stream(request, hold, context)
        except TimeoutError:
            return Refusal(
                Reason.DEADLINE_EXCEEDED, f"the transfer took more than {self._timeout} s"
            )
        finally:
            self.leases -= 1
            self._engine.release(request.request_id)

    async def _stream(self, request: Request, hold: "_Hold", context: Context) -> Refusal | None:
        sender = _Sender(self._engine, request.request_id, self._identity, context)
        block_size = self._limits.block_size
        total = num_blocks(len(request.prompt_ids) + len(request.output_ids), block_size)
        next_block = request.skip_tokens // block_size
        while True:
            await hold.changed()
            done = hold.output
            if done is not None and not done.token_ids:
                return done.refusal or Refusal(Reason.CANCELLED, "the prefill was aborted")
            # The last block waits for the token, which goes in the same frame.
            ready = total if done else min(hold.computed_tokens // block_size, total - 1)
            if ready <= next_block:
                continue
            if done:
                self._metrics.prefilled(hold.queue_seconds + hold.compute_seconds)
            result = _result(done, request.skip_tokens, hold) if done else None
            ahead = spans(next_block, ready, blocks_per_frame(self._identity.block_bytes))
            sent = await sender.send(ahead, result)
            if sent is None:
                return Refusal(Reason.CANCELLED, "the prefill was aborted")
            self._metrics.transfer_sent(sent)
            next_block = ready
            if done:
                return None


class _Hold:
    """HoldSink of one request: keeps the latest news, and wakes the one who waits for it."""

    def __init__(self, bridge: LoopBridge) -> None:
        self._bridge = bridge
        self._news = asyncio.Event()
        self._submitted = time.monotonic()
        self._started: float | None = None
        self._finished = 0.0
        self.computed_tokens = 0
        self.output: Output | None = None

    def progress(self, request_id: str, computed_tokens: int) -> None:  # noqa: ARG002  # one request
        self._bridge.post(self._on_progress, computed_tokens, time.monotonic())

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._bridge.post(self._on_output, output, time.monotonic())

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()

    def _on_progress(self, computed_tokens: int, now: float) -> None:
        self._started = self._started or now
        self.computed_tokens = computed_tokens
        self._news.set()

    def _on_output(self, output: Output, now: float) -> None:
        if self.output is None:
            self.output = output
            self._finished = now
            self._news.set()

    @property
    def queue_seconds(self) -> float:
        """From the submit to the admission, of which the engine tells before it computes."""
        return (self._started or self._finished) - self._submitted

    @property
    def compute_seconds(self) -> float:
        return self._finished - (self._started or self._finished)


class _Sender:
    """Reads spans of one request's blocks from the engine and writes them as frames."""

    def __init__(
        self, engine: Engine, request_id: str, identity: Identity, context: Context
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._epoch = identity.epoch
        self._context = context
        self._sequence = 0

    async def send(self, ahead: Sequence[Span], result: pb.PrefillResult | None) -> int | None:
        """Bytes sent; None if the request is gone. ``result`` goes with the last span."""
        reads: deque[tuple[Span, Future[memoryview | None]]] = deque()
        todo = deque(ahead)
        sent = 0
        while todo or reads:
            while todo and len(reads) < _READS_AHEAD:
                span = todo.popleft()
                future = self._engine.read_blocks(self._request_id, span.first_block, span.count)
                reads.append((span, future))
            span, future = reads.popleft()
            payload = await asyncio.shield(asyncio.wrap_future(future))
            if payload is None:
                return None
            last = not (todo or reads)
            await self._write(span, payload, result if last else None)
            sent += len(payload)
        return sent

    async def _write(
        self, span: Span, payload: memoryview, result: pb.PrefillResult | None
    ) -> None:
        await self._context.write(
            Frame(
                sequence=self._sequence,
                first_block=span.first_block,
                block_count=span.count,
                checksum=checksum(payload),
                epoch=self._epoch,
                payload=payload,
                result=result,
            )
        )
        self._sequence += 1


def _result(output: Output, skip_tokens: int, hold: _Hold) -> pb.PrefillResult:
    cached = output.prefill.cached_tokens if output.prefill is not None else 0
    return pb.PrefillResult(
        token_id=output.token_ids[0],
        logprobs=output.logprobs[0].to_proto() if output.logprobs else None,
        holder_cached_tokens=max(0, cached - skip_tokens),
        queue_seconds=hold.queue_seconds,
        compute_seconds=hold.compute_seconds,
    )


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.time() + remaining
