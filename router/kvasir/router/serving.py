"""One generation on its way through the fleet: attempts, retries, replays.

    place -> submit -> tokens ... finish
      ^         |          |
      |      refused     lost          each token is given to the caller exactly once:
      +---------+----------+           a new attempt carries the tokens given so far

Invariants
- The last event is Finished only if a worker said so; everything else ends in Refused.
- However it ends, the worker is told to abort what it still runs, and charges are released.
- A replay goes only to workers with the same weights.
- A refusal for which another worker may help (``Codes.retry_elsewhere``) moves on to
  another one; any other is the caller's answer. Only INTERNAL opens the worker's breaker.
- Waiting for a worker has one time limit, set when the generation comes and set anew when
  its worker is lost; attempts that are refused in between do not extend it.
- A generation that has lost ``SUSPECT_AFTER`` workers in a row is a suspect until its next token:
  it is alone among suspects on its worker, and never uses a prefill worker (ADR 6).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import (
    Finished,
    Generation,
    GenerationEvent,
    Refused,
)
from kvasir.router.convert import (
    FINISH_REASONS,
    first_event,
    found_event,
    next_event,
    submit_to_proto,
)
from kvasir.router.cost import Group
from kvasir.router.fleet import Fleet
from kvasir.router.metrics import GenerationMetrics
from kvasir.router.placement import Placement, Placer
from kvasir.router.worker_link import Ending

log = logging.getLogger("kvasir.router")

QUEUE_RETRY_AFTER = 1.0
CAPACITY_RETRY_AFTER = 5.0
"""A worker takes seconds to come up; queues move faster."""

SUSPECT_AFTER = 2
"""Workers lost in a row without a token between: such a request may be what ends them."""
MAX_LOSSES = 4
"""After so many it is not tried again. The loss of a worker that was leaving counts nothing."""
MAX_REFUSALS = 16
"""Of a generation without any output; one that the caller has tokens of goes on asking for as
long as ``replay_timeout`` allows."""
SPECULATE_EVERY = 1.0
"""While a prompt is not computed, the speculation that it soon will be is renewed this often."""
REPLAY_BACKOFF = 0.25
"""Between rounds of asking workers that are all full to take a replay."""


class Serving:
    """State of one generation. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        generation: Generation,
        config: RouterConfig,
        fleet: Fleet,
        placer: Placer,
        metrics: GenerationMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._generation = generation
        self._config = config
        self._fleet = fleet
        self._placer = placer
        self._metrics = metrics
        self._clock = clock
        self._output_ids: list[int] = []
        self._began: Group | None = None
        self._attempts = 0
        self._losses = 0
        self._was_lost = False
        self._quarantined: str | None = None
        self._refused_by: set[str] = set()
        self._refusals = 0
        self._last_refusal: Refusal | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._wait_from_now(config.no_worker_timeout)

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        """All events, ending with Finished or Refused. Close it to abort."""
        while True:
            placement = await self._place()
            if isinstance(placement, Refused):
                yield placement
                return
            async with aclosing(self._attempt(placement)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, Finished | Refused):
                        return

    # --- placing ---------------------------------------------------------------------------

    async def _place(self) -> Placement | Refused:
        """Wait for a worker, until the time limit."""
        placement = self._try_place()
        if placement is not None:
            return placement
        with self._metrics.held(self._placer.roles_of(self._generation)):
            return await self._place_when_possible()

    async def _place_when_possible(self) -> Placement | Refused:
        while True:
            remaining = pause = self._until - self._clock()
            if self._refused_by and self._fleet.decode_groups(self._began):
                begun = self._output_ids or self._is_suspect
                if not begun and self._last_refusal is not None:
                    return _refused(self._last_refusal)
                self._refused_by.clear()
                pause = min(remaining, REPLAY_BACKOFF)
            if remaining <= 0:
                if not (self._is_suspect and self._fleet.decode_groups(self._began)):
                    return self._no_capacity()
                # Each suspect's turn ends, so that all of them come to theirs.
                self._wait_from_now(max(self._config.replay_timeout, REPLAY_BACKOFF))
                continue
            await self._fleet.changed(pause)
            placement = self._try_place()
            if placement is not None:
                return placement

    def _wait_from_now(self, patience: float) -> None:
        self._patience = patience
        self._until = self._clock() + patience

    def _try_place(self) -> Placement | None:
        wire_id = self._generation.request_id
        if self._attempts:
            # A worker that has not noticed the break yet would refuse the same id again.
            wire_id = f"{wire_id}~{self._attempts}"
        suspect = self._is_suspect
        with self._metrics.choice_seconds.time():
            placement = self._placer.place(
                self._generation,
                wire_id,
                self._output_ids,
                began=self._began,
                exclude=self._refused_by | self._fleet.quarantined if suspect else self._refused_by,
                alone=suspect,
            )
        if placement is not None:
            if suspect:
                self._quarantined = placement.decode.worker_id
                self._fleet.quarantined.add(self._quarantined)
            self._attempts += 1
            self._metrics.disaggregated.labels(placement.decision.value).inc()
        return placement

    @property
    def _is_suspect(self) -> bool:
        return self._losses >= SUSPECT_AFTER

    def _leave_quarantine(self) -> None:
        if self._quarantined is not None:
            self._fleet.end_quarantine(self._quarantined)
            self._quarantined = None

    def _no_capacity(self) -> Refused:
        what = "No worker took over in time" if self._was_lost else "No worker is ready"
        message = f"{what} (waited {self._patience:g} s); try again later."
        return Refused(Refusal(Reason.NO_CAPACITY, message), CAPACITY_RETRY_AFTER)

    # --- one attempt -----------------------------------------------------------------------

    async def _attempt(self, placement: Placement) -> AsyncGenerator[GenerationEvent]:
        """Events of one worker. Ends without a last event if another attempt is due."""
        prefill = placement.prefill
        submit = submit_to_proto(
            self._generation,
            placement.wire_id,
            self._output_ids,
            None if prefill is None else prefill.prefill_peer(),
        )
        link = placement.decode.link
        queue = link.submit(submit)
        self._renew_later(placement)
        running = True
        try:
            while running:
                output = await queue.get()
                if output is Ending.LOST:
                    running = False
                    gave_up = self._count_loss(placement)
                    if gave_up is not None:
                        yield gave_up
                    return
                running = output.finish_reason == pb.FINISH_REASON_UNSPECIFIED
                if output.token_ids:
                    yield self._tokens(output, placement)
                if output.hypotheses:
                    self._learn(output, placement)
                    yield found_event(output, placement.decode.worker_id)
                if not running:
                    last = self._finish(output, placement)
                    if last is not None:
                        yield last
        finally:
            self._stop_renewal()
            self._leave_quarantine()
            link.leave(placement.wire_id, abort=running)
            self._placer.release(placement)

    def _renew_later(self, placement: Placement) -> None:
        def renew() -> None:
            self._placer.speculate(placement)
            self._renew_later(placement)

        self._renewal = asyncio.get_running_loop().call_later(SPECULATE_EVERY, renew)

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _tokens(self, output: pb.SequenceOutput, placement: Placement) -> GenerationEvent:
        self._learn(output, placement)
        first = not self._output_ids
        self._output_ids.extend(output.token_ids)
        self._losses = 0
        self._leave_quarantine()
        if not first:
            return next_event(output)
        self._began = placement.group
        return first_event(output, placement.decode.worker_id)

    def _learn(self, output: pb.SequenceOutput, placement: Placement) -> None:
        """How the prompt was computed, if this output is the one that tells."""
        if output.HasField("prefill"):
            self._placer.computed(placement)
            self._stop_renewal()
            if output.prefill.peer_fault and placement.prefill is not None:
                self._fleet.trip(placement.prefill)

    def _finish(self, output: pb.SequenceOutput, placement: Placement) -> Finished | Refused | None:
        """The last event; None if another attempt is due."""
        reason = FINISH_REASONS.get(output.finish_reason)
        if reason is not None:
            return Finished(reason)
        if output.finish_reason == pb.FINISH_REASON_REFUSED:
            return self._take_refusal(Refusal.from_proto(output.refusal), placement)
        # Nobody here asked for an abort, so the worker is being stopped: as good as lost.
        return self._count_loss(placement)

    def _take_refusal(self, refusal: Refusal, placement: Placement) -> Refused | None:
        self._refusals += 1
        self._last_refusal = refusal
        if refusal.reason is Reason.INTERNAL:
            self._fleet.trip(placement.decode)
        exhausted = self._refusals >= MAX_REFUSALS and not self._output_ids
        if exhausted or not refusal.codes.retry_elsewhere:
            return _refused(refusal)
        if refusal.reason is Reason.DRAINING:
            self._fleet.mark_draining(placement.decode)
        else:
            self._refused_by.add(placement.decode.worker_id)
        self._metrics.retries.inc()
        return None

    def _count_loss(self, placement: Placement) -> Refused | None:
        self._was_lost = True
        self._wait_from_now(self._config.replay_timeout)
        if not placement.decode.is_leaving:
            self._losses += 1
        if self._is_suspect:
            log.warning(
                "request may be what ends its workers request=%s losses=%d last=%s",
                *(self._generation.request_id, self._losses, placement.decode.worker_id),
            )
        if self._losses >= MAX_LOSSES:
            message = (
                f"{self._losses} workers were lost one after the other while they served this "
                "request, which got no further on any of them; it is not tried again."
            )
            return Refused(Refusal(Reason.INTERNAL, message))
        self._metrics.replays.inc()
        return None


def _refused(refusal: Refusal) -> Refused:
    if refusal.reason is Reason.QUEUE_FULL:
        return Refused(refusal, QUEUE_RETRY_AFTER)
    if refusal.codes.http == 503:
        return Refused(refusal, CAPACITY_RETRY_AFTER)
    return Refused(refusal)
