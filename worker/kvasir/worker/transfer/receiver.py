"""The decode side of a transfer: pull a prompt's KV from a prefill worker, believing nothing.

The engine is always told how it ended: everything came (``finish_receive``), or compute the
rest here (``fail_receive``). A request that is gone, and only that, needs neither. However
it ends, the call is over when ``receive`` returns, and with it the holder's lease.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from kvasir.proto.errors import Reason
from kvasir.proto.sampling import TokenLogprobs
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.contracts import Request, Sampled
from kvasir.worker.engine import Engine
from kvasir.worker.metrics import WorkerMetrics
from kvasir.worker.service.requests import Peer
from kvasir.worker.transfer.check import PEER_FAULTS, Expected, Fault, FrameCheck, Outcome
from kvasir.worker.transfer.frames import Frame, FrameError, decode
from kvasir.worker.transfer.layout import Identity, num_blocks
from kvasir.worker.transfer.peers import REFUSAL_METADATA, Peers

_COMMITS_AHEAD = 32
"""Frames that may wait for the engine to write them: bounds memory, hides a step's time."""

_log = logging.getLogger("kvasir.worker.transfer")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. ``stall`` is for the answer to the call, and then from one frame to the next.

    The wait for the first frame has only ``total``: a prefill worker may have a queue.
    """

    total: float
    stall: float


@dataclass(frozen=True, slots=True)
class _Complete:
    """All KV is committed, and this is the first token."""

    sampled: Sampled
    holder_cached_tokens: int
    queue_seconds: float
    compute_seconds: float


def worth_pulling(num_tokens: int, num_cached_tokens: int, block_size: int) -> bool:
    """One block or less is computed here faster than it is asked for."""
    return num_tokens - num_cached_tokens > block_size


class Receiver:
    """Pulls KV for the requests of this worker's engine."""

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        identity: Identity,
        metrics: WorkerMetrics,
        timeouts: Timeouts,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._identity = identity
        self._metrics = metrics
        self._timeouts = timeouts
        self._clock: Callable[[], float] = time.monotonic

    async def receive(self, request: Request, peer: Peer, num_cached_tokens: int) -> None:
        """Pull what ``request`` lacks from ``peer``, and tell the engine how it ended.

        ``num_cached_tokens`` leading tokens, whole blocks, are here already. Cancel it when
        the request goes away.
        """
        started = self._clock()
        ending: _Complete | Fault = Fault(Outcome.INTERNAL, "an error on this side")
        try:
            ending = await self._pull(request, peer, num_cached_tokens)
        except asyncio.CancelledError:
            ending = Fault(Outcome.ABORTED, "the request went away")
            raise
        finally:
            self._end(request, peer, ending, self._clock() - started)

    def _end(self, request: Request, peer: Peer, ending: _Complete | Fault, seconds: float) -> None:
        if isinstance(ending, _Complete):
            self._metrics.transfer_ended(Outcome.OK, seconds)
            self._metrics.holder_times(ending.queue_seconds, ending.compute_seconds)
            self._engine.finish_receive(
                request.request_id, ending.sampled, ending.holder_cached_tokens
            )
            return
        self._metrics.transfer_ended(ending.outcome, seconds)
        if ending.outcome is Outcome.ABORTED:
            return
        _log.warning(
            "KV transfer failed, computing the prompt here: %s request=%s peer=%s outcome=%s",
            *(ending.message, request.request_id, peer.worker_id, ending.outcome),
        )
        self._engine.fail_receive(
            request.request_id, peer_fault=self._is_peer_fault(request, ending.outcome)
        )

    @staticmethod
    def _is_peer_fault(request: Request, outcome: Outcome) -> bool:
        """A request whose own deadline has cut the transfer short accuses nobody."""
        if outcome is Outcome.TIMEOUT and request.deadline is not None:
            return time.time() < request.deadline
        return outcome in PEER_FAULTS

    async def _pull(self, request: Request, peer: Peer, cached: int) -> _Complete | Fault:
        message = self._message(request, peer, cached)
        expected = self._expected(request, peer, cached)
        async with self._peers.prefill(peer.address) as prefill:
            call = prefill(message, timeout=self._timeout(request))
            try:
                async with asyncio.timeout(self._timeouts.stall):
                    await call.initial_metadata()
                return await self._read(call, request.request_id, FrameCheck(expected))
            except TimeoutError:
                return Fault(Outcome.TIMEOUT, f"nothing came for {self._timeouts.stall} s")
            except grpc.aio.AioRpcError as error:
                return _rpc_fault(error)
            finally:
                call.cancel()

    async def _read(
        self,
        call: grpc.aio.UnaryStreamCall[kv_pb.PrefillRequest, bytes],
        request_id: str,
        check: FrameCheck,
    ) -> _Complete | Fault:
        commits: deque[Future[bool]] = deque()
        complete: _Complete | None = None
        stall: float | None = None
        while True:
            async with asyncio.timeout(stall):
                data = await call.read()
            if not isinstance(data, bytes):  # grpc.aio.EOF
                break
            stall = self._timeouts.stall
            frame = _checked(data, check)
            if isinstance(frame, Fault):
                return frame
            self._metrics.transfer_received(len(frame.payload))
            commits.append(self._engine.commit_blocks(request_id, frame.first_block, frame.payload))
            if len(commits) > _COMMITS_AHEAD and not await _done(commits.popleft()):
                return Fault(Outcome.ABORTED, "the request went away")
            if frame.result is not None:
                complete = _complete(frame.result)
        if complete is None:
            return Fault(Outcome.BROKEN, "the stream ended before the last block")
        while commits:
            if not await _done(commits.popleft()):
                return Fault(Outcome.ABORTED, "the request went away")
        return complete

    def _message(self, request: Request, peer: Peer, cached: int) -> kv_pb.PrefillRequest:
        return kv_pb.PrefillRequest(
            request_id=request.request_id,
            token_ids=(*request.prompt_ids, *request.output_ids),
            num_output_tokens=len(request.output_ids),
            sampling=request.sampling.to_proto(),
            cache_salt=request.cache_salt,
            priority=request.priority,
            num_cached_tokens=cached,
            layout=self._identity.layout,
            receiver_epoch=self._identity.epoch,
            expected_epoch=peer.epoch,
        )

    def _expected(self, request: Request, peer: Peer, cached: int) -> Expected:
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        block_size = self._identity.layout.block_size
        return Expected(
            epoch=peer.epoch,
            first_block=cached // block_size,
            end_block=num_blocks(num_tokens, block_size),
            block_bytes=self._identity.block_bytes,
            missing_tokens=num_tokens - cached,
            vocab_size=self._identity.vocab_size,
            wants_logprobs=request.sampling.logprobs is not None,
        )

    def _timeout(self, request: Request) -> float:
        if request.deadline is None:
            return self._timeouts.total
        return max(0.0, min(self._timeouts.total, request.deadline - time.time()))


def _checked(data: bytes, check: FrameCheck) -> Frame | Fault:
    try:
        frame = decode(data)
    except FrameError as error:
        return Fault(Outcome.BROKEN, f"not a frame: {error}")
    return check.check(frame) or frame


def _complete(result: kv_pb.PrefillResult) -> _Complete:
    asked = result.HasField("logprobs")
    logprobs = TokenLogprobs.from_proto(result.logprobs) if asked else None
    return _Complete(
        Sampled(result.token_id, logprobs),
        result.holder_cached_tokens,
        result.queue_seconds,
        result.compute_seconds,
    )


async def _done(commit: Future[bool]) -> bool:
    """The engine owns the future: cancelling the wait must not cancel it."""
    return await asyncio.shield(asyncio.wrap_future(commit))


def _rpc_fault(error: grpc.aio.AioRpcError) -> Fault:
    """What a call that ended with an error means for the transfer."""
    refusal = dict(error.trailing_metadata() or ()).get(REFUSAL_METADATA)
    if refusal == Reason.EPOCH_MISMATCH.name:
        outcome = Outcome.EPOCH
    elif refusal == Reason.LAYOUT_MISMATCH.name:
        outcome = Outcome.LAYOUT
    elif refusal is not None:
        outcome = Outcome.REFUSED
    elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        outcome = Outcome.TIMEOUT
    else:
        outcome = Outcome.BROKEN
    return Fault(outcome, f"{error.code().name}: {error.details()}")
