"""The workers that the router knows: sessions, loads, prefix index, who may be chosen.

Owns the members and all that is derived from what they say. Runs on one event loop; every
method is synchronous unless it waits for a worker.

Invariants
- A worker that left its source, is withheld by it, drains, fell silent or lost its session
  is out of the pools before the next choice. What it still computes for us goes on.
- A worker's index entries are those of its current epoch.
- Workers with another model than the served one (fleet_model) are connected but not chosen, and
  say so (``Member.objection``).

Must not: submit requests (dispatcher) or weigh costs (cost, placement).
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable

from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import WorkerStatus
from kvasir.router.convert import cache_events, group_of, role_of
from kvasir.router.cost import Group
from kvasir.router.discovery import WorkerAddress, WorkerSource
from kvasir.router.fleet_model import FleetModel
from kvasir.router.member import Member
from kvasir.router.metrics import FleetMetrics
from kvasir.router.pools import Loads, Pools
from kvasir.router.prefix_index import PrefixIndex
from kvasir.router.worker_link import LOST_SECONDS, SUSPECT_SECONDS, WorkerLink, report_crash

log = logging.getLogger("kvasir.router")

TICK_SECONDS = 0.2
BREAKER_SECONDS = 5.0
"""How long a worker that failed inside is left alone."""


class Fleet:
    """All workers of one router. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        config: RouterConfig,
        source: WorkerSource,
        metrics: FleetMetrics,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.index = PrefixIndex(config.prefix_index_bytes, clock)
        self.pools = Pools()
        self.quarantined: set[str] = set()
        """Workers that have a request which may be what ends them: no second one is sent there."""
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._source = source
        self._members: dict[str, Member] = {}
        self.model = FleetModel(self._members)
        self._changed = asyncio.Event()
        self._retiring: dict[asyncio.Task[None], WorkerLink] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._last_tick = clock()

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to find workers and to connect. Raises SourceError."""
        await self._source.start()
        self._tick()
        self._ticker = asyncio.create_task(self._run(), name="fleet")
        self._ticker.add_done_callback(report_crash)

    async def close(self) -> None:
        """End all sessions; requests still running are told that their worker is lost."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        await self._source.close()
        links = [m.link for m in self._members.values()] + list(self._retiring.values())
        retirements = list(self._retiring)
        await asyncio.gather(*(link.close() for link in links), *retirements)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._tick()

    def _tick(self) -> None:
        """What happens by the passing of time."""
        listed = self._source.poll()
        if listed is not None:
            self.set_workers(listed)
        now = self._clock()
        elapsed, self._last_tick = now - self._last_tick, now
        self.model.settle()
        for member in self._members.values():
            silence = now - member.link.last_heard
            member.silent = silence > SUSPECT_SECONDS
            member.load.decay(elapsed)
            if member.link.is_open and silence > LOST_SECONDS:
                member.link.give_up()
            self.refresh(member)
            in_flight = self._metrics.worker_in_flight.labels(member.worker_id)
            in_flight.set(member.load.in_flight)
        self._metrics.discovery_current.set(self._source.current)
        self.index.tick()
        self._metrics.index_bytes.set(self.index.bytes_used)
        self._metrics.index_blocks.set(self.index.num_blocks)
        self._metrics.count_workers(Counter(m.state for m in self._members.values()))

    # --- who there is ----------------------------------------------------------------------

    def set_workers(self, listed: tuple[WorkerAddress, ...]) -> None:
        """Connect to new workers, part from those that are gone or have moved."""
        wanted = {worker.worker_id: worker for worker in listed}
        for member in list(self._members.values()):
            worker = wanted.get(member.worker_id)
            if worker is None or worker.address != member.address:
                self._part(member)
        for worker in wanted.values():
            member = self._members.get(worker.worker_id) or self._join(worker)
            member.withheld = not worker.accepts
        self.model.settle()
        for member in self._members.values():
            self.refresh(member)

    def _join(self, worker: WorkerAddress) -> Member:
        link = WorkerLink(
            worker.worker_id,
            worker.address,
            self._config.router_id,
            self,
            clock=self._clock,
            rng=self._rng,
        )
        member = Member(worker.worker_id, worker.address, link)
        self._members[worker.worker_id] = member
        self._metrics.resyncs.labels(worker.worker_id)
        link.start()
        return member

    def _part(self, member: Member) -> None:
        log.info("worker left worker=%s address=%s", member.worker_id, member.address)
        member.withheld = True  # for those who still wait for what it has of them
        del self._members[member.worker_id]
        self.pools.remove(member.worker_id)
        self.index.remove_worker(member.worker_id)
        self._metrics.forget_worker(member.worker_id)
        task = asyncio.create_task(member.link.retire(), name=f"retire-{member.worker_id}")
        self._retiring[task] = member.link
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    def member(self, worker_id: str) -> Member:
        return self._members[worker_id]

    def statuses(self) -> list[WorkerStatus]:
        return [member.status() for member in self._members.values()]

    # --- who may be chosen -----------------------------------------------------------------

    def refresh(self, member: Member) -> None:
        """After any change of a member: its place and cost in the pools."""
        if member.group is None or self._members.get(member.worker_id) is not member:
            return
        objection = self.model.objection(member.group)
        if objection and not member.objection:
            log.warning("worker not used worker=%s: it %s", member.worker_id, objection)
        member.objection = objection
        if objection:
            self.pools.remove(member.worker_id)
            return
        standing = member.standing(self._clock())
        if self.pools.update(member.worker_id, member.group, standing, member.load):
            self._announce()

    def end_quarantine(self, worker_id: str) -> None:
        """The worker's suspect has gone on, or is gone. Unknown ones are fine."""
        self.quarantined.discard(worker_id)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, patience: float) -> None:
        """Wait until a worker becomes eligible or its quarantine ends, at most ``patience`` s."""
        try:
            async with asyncio.timeout(patience):
                await self._changed.wait()
        except TimeoutError:
            return

    def decode_groups(self, began: Group | None) -> list[tuple[Group, Loads]]:
        """Where a new prompt may go, or the continuation of one that ``began`` started."""
        return [
            (group, loads)
            for group, loads in self.pools.decode()
            if began is None or group.serves(began)
        ]

    def trip(self, member: Member) -> None:
        """A worker failed inside: leave it alone for a moment."""
        member.breaker_until = self._clock() + BREAKER_SECONDS
        log.warning("breaker open worker=%s", member.worker_id)
        self.refresh(member)

    def mark_draining(self, member: Member) -> None:
        """A worker refused because it drains, before its next report says so."""
        member.draining = True
        self.refresh(member)

    # --- LinkListener ----------------------------------------------------------------------

    def objection(self, link: WorkerLink, info: pb.WorkerInfo) -> str | None:
        """A port that another worker took over must not be mistaken for the old one."""
        if info.worker_id != link.worker_id:
            return f"the worker at {link.address} calls itself {info.worker_id!r}"
        if info.layout.block_size < 1:
            return "the worker's block size is not set"
        if role_of(info.role) is None:
            return f"the worker's role {info.role} is not known"
        return None

    def opened(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        member = self._current(link)
        if member is None:
            return
        if member.info is None or member.info.epoch != info.epoch:
            self.index.reset_worker(link.worker_id)
        self.index.await_snapshot(link.worker_id)
        link.request_snapshot()
        member.info = info
        member.group = group_of(info)
        member.role = role_of(info.role) or member.role
        member.draining = info.draining
        member.silent = False
        member.breaker_until = 0.0
        member.load.report(0, 0)
        self.model.settle()
        self.refresh(member)

    def closed(self, link: WorkerLink) -> None:
        member = self._current(link)
        if member is not None:
            self.refresh(member)

    def said(self, link: WorkerLink, message: pb.WorkerMessage) -> None:
        member = self._current(link)
        if member is None:
            return
        match message.WhichOneof("kind"):
            case "load":
                self._take_report(member, message.load)
            case "kv_events":
                batch = message.kv_events
                gap = self.index.apply(link.worker_id, batch.first_sequence, cache_events(batch))
                self._resync_after(gap, link)
            case "kv_snapshot":
                part = message.kv_snapshot
                gap = self.index.apply_snapshot(
                    link.worker_id, part.sequence, part.block_hashes, part.last
                )
                self._resync_after(gap, link)

    def _take_report(self, member: Member, report: pb.LoadReport) -> None:
        member.report = report
        member.load.report(report.queued_prefill_tokens, report.active_kv_tokens)
        member.draining = report.draining
        member.role = role_of(report.role) or member.role
        member.silent = False
        self.refresh(member)

    def _resync_after(self, gap: bool, link: WorkerLink) -> None:
        if gap:
            self._metrics.resyncs.labels(link.worker_id).inc()
            link.request_snapshot()

    def _current(self, link: WorkerLink) -> Member | None:
        """The member of this link; None if the worker has left and is only finishing."""
        member = self._members.get(link.worker_id)
        return member if member is not None and member.link is link else None
