"""All sessions of a worker: what concerns every router goes out here.

The engine's listener. Its two methods are called on the engine's thread and only post.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import KvEvent, Load
from kvasir.worker.service.bridge import LoopBridge
from kvasir.worker.service.convert import events_proto, load_proto
from kvasir.worker.service.identity import WorkerIdentity
from kvasir.worker.service.session import Session

LOAD_INTERVAL = 1.0
"""Seconds between load reports while nothing happens."""


class SessionHub:
    def __init__(
        self,
        bridge: LoopBridge,
        identity: WorkerIdentity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bridge = bridge
        self._identity = identity
        self._clock = clock
        self._reported = clock()
        self._sessions: set[Session] = set()

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None:
        self._bridge.post(self._send_events, first_sequence, events)

    def on_load(self, load: Load) -> None:
        self._bridge.post(self.report, load)

    @property
    def idle(self) -> bool:
        """Whether no session has anything left to do."""
        return all(session.idle for session in self._sessions)

    @contextmanager
    def joined(self, session: Session, load: Load) -> Iterator[None]:
        """While inside, the session hears of events and load; of ``load`` at once."""
        self._sessions.add(session)
        session.put_load(self._load_message(load))
        try:
            yield
        finally:
            self._sessions.remove(session)

    def report(self, load: Load) -> None:
        """Send a load report to every router."""
        self._reported = self._clock()
        message = self._load_message(load)
        for session in self._sessions:
            session.put_load(message)

    def report_if_quiet(self, load: Load) -> None:
        """Send one if none has been sent for about ``LOAD_INTERVAL``. Called that often."""
        if self._clock() - self._reported >= LOAD_INTERVAL / 2:
            self.report(load)

    def finish(self) -> None:
        """End every session in good order."""
        for session in self._sessions:
            session.finish()

    def _send_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None:
        if self._sessions:
            message = pb.WorkerMessage(kv_events=events_proto(first_sequence, events))
            for session in self._sessions:
                session.put(message)

    def _load_message(self, load: Load) -> pb.WorkerMessage:
        report = load_proto(load, draining=self._identity.draining, role=self._identity.role)
        return pb.WorkerMessage(load=report)
