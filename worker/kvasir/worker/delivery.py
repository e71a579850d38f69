"""What an engine says to others: to whom a request's news go, KV events in order, and the load.

Owns which sink hears of which request, the numbers of KV events, and the load as it is told. A
request counts as waiting from its acceptance on, before the scheduler knows of it. Takes
news from the scheduler, and changes nothing there. Sinks and the listener are called on the
engine thread without any lock held.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from kvasir.worker.contracts import (
    EngineListener,
    HoldSink,
    Load,
    Output,
    OutputSink,
    ReceiveSink,
    Request,
)
from kvasir.worker.scheduler import Scheduler
from kvasir.worker.signals import Progress
from kvasir.worker.turns import Turns


class Delivery:
    def __init__(self, scheduler: Scheduler, listener: EngineListener, turns: Turns) -> None:
        self._scheduler = scheduler
        self._listener = listener
        self._turns = turns
        self._event_sequence = 0  # number of the last KV event told

        self._lock = threading.Lock()  # guards everything below
        self._sinks: dict[str, OutputSink] = {}
        self._ended = False
        self._num_accepted = 0
        self._untold: deque[int] = deque()  # tokens of the latest of these, not in _load yet
        self._load = scheduler.load()

    # --- any thread --------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is accepted and not over."""
        with self._lock:
            return request_id in self._sinks

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self._load.waiting + len(self._untold)

    def accept(self, request: Request, sink: OutputSink) -> None:
        """A request that the scheduler is going to get next, under an id not in use."""
        with self._lock:
            self._sinks[request.request_id] = sink
            self._num_accepted += 1
            self._untold.append(len(request.prompt_ids) + len(request.output_ids))

    def load(self) -> Load:
        """As of the last step, with what was accepted since."""
        with self._lock:
            return self._load_now()

    # --- the engine thread -------------------------------------------------------------------

    def tell(self) -> None:
        """All news since the last time, to everyone."""
        self.tell_signals()
        self._tell_outputs()
        self._tell_events()
        load = self._scheduler.load()
        with self._lock:
            changed = load != self._load
            self._load = load
            while self._num_accepted - len(self._untold) < self._scheduler.num_arrivals:
                self._untold.popleft()
            told = self._load_now()
        if changed:
            self._listener.on_load(told)

    def tell_signals(self) -> None:
        """What transfers wait for, which need not wait for a step to end."""
        for signal in self._scheduler.take_signals():
            with self._lock:
                sink = self._sinks[signal.request_id]
            if isinstance(signal, Progress):
                cast("HoldSink", sink).progress(signal.request_id, signal.computed_tokens)
            else:
                cast("ReceiveSink", sink).reserved(signal.request_id, signal.num_cached_tokens)

    def snapshot(self, tell: Callable[[int, list[bytes]], None]) -> None:
        """Have ``tell`` called as Engine.snapshot says; after ``end``, nothing happens."""
        with self._lock:
            if self._ended:
                return
        self._tell_events()
        tell(self._event_sequence, self._scheduler.cached_hashes())

    def forget(self, request_id: str) -> None:
        """A request is over without an output that says so."""
        with self._lock:
            del self._sinks[request_id]

    def end(self) -> None:
        """Nobody hears of anything any more."""
        with self._lock:
            self._ended = True
            self._sinks.clear()

    def _load_now(self) -> Load:
        """The caller holds the lock."""
        return replace(
            self._load,
            waiting=self._load.waiting + len(self._untold),
            queued_prefill_tokens=self._load.queued_prefill_tokens + sum(self._untold),
            busy_seconds=self._turns.busy_seconds,
        )

    def _tell_outputs(self) -> None:
        batches: dict[int, tuple[OutputSink, list[Output]]] = {}
        with self._lock:
            for output in self._scheduler.take_outputs():
                sink = self._sinks[output.request_id]
                batches.setdefault(id(sink), (sink, []))[1].append(output)
                if output.finish is not None and output.request_id not in self._scheduler:
                    del self._sinks[output.request_id]
        for sink, outputs in batches.values():
            sink.deliver(outputs)

    def _tell_events(self) -> None:
        events = self._scheduler.take_events()
        if events:
            first = self._event_sequence + 1
            self._event_sequence += len(events)
            self._listener.on_kv_events(first, events)
