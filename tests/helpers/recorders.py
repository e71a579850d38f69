"""Sinks and a listener that keep what the engine tells, for other threads to wait for."""

import threading
from collections.abc import Callable, Sequence

from kvasir.worker.contracts import (
    BlocksRemoved,
    BlocksStored,
    Finish,
    KvEvent,
    Load,
    Output,
)

WAIT_SECONDS = 30.0


class Recorder:
    """OutputSink, ReceiveSink and HoldSink in one; ``on_reserved`` and ``on_progress`` may react.

    ``batches`` keeps every call of deliver.
    """

    def __init__(
        self,
        on_reserved: Callable[[str, int], None] | None = None,
        on_progress: Callable[[str, int], None] | None = None,
    ) -> None:
        self._on_reserved = on_reserved
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self.batches: list[list[Output]] = []
        self.reservations: list[tuple[str, int]] = []
        self.progressed: list[tuple[str, int]] = []

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self.batches.append(list(outputs))
            self._changed.notify_all()

    def reserved(self, request_id: str, num_cached_tokens: int) -> None:
        with self._changed:
            self.reservations.append((request_id, num_cached_tokens))
            self._changed.notify_all()
        if self._on_reserved is not None:
            self._on_reserved(request_id, num_cached_tokens)

    def progress(self, request_id: str, computed_tokens: int) -> None:
        with self._changed:
            self.progressed.append((request_id, computed_tokens))
            self._changed.notify_all()
        if self._on_progress is not None:
            self._on_progress(request_id, computed_tokens)

    def outputs(self, request_id: str) -> list[Output]:
        with self._changed:
            return [o for batch in self.batches for o in batch if o.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.token_ids]

    def finish(self, request_id: str) -> Finish | None:
        outputs = self.outputs(request_id)
        return outputs[-1].finish if outputs else None

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds; it is asked after each call by the engine."""
        with self._changed:
            if not self._changed.wait_for(condition, WAIT_SECONDS):
                raise TimeoutError(f"not so after {WAIT_SECONDS} seconds")

    def wait_finished(self, *request_ids: str) -> None:
        self.wait(lambda: all(self.finish(request_id) is not None for request_id in request_ids))


class RecordingListener:
    """EngineListener that follows the KV events as a router does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.sequence = 0
        self.known: set[bytes] = set()
        self.loads: list[Load] = []

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None:
        with self._changed:
            if first_sequence != self.sequence + 1:
                raise AssertionError(f"event {first_sequence} follows {self.sequence}")
            self.sequence += len(events)
            for event in events:
                self._follow(event)
            self._changed.notify_all()

    def on_load(self, load: Load) -> None:
        with self._changed:
            self.loads.append(load)
            self._changed.notify_all()

    def wait_load(self, condition: Callable[[Load], bool]) -> Load:
        """The first load from now on, or the latest one, for which ``condition`` holds."""
        with self._changed:
            held = self._changed.wait_for(
                lambda: bool(self.loads) and condition(self.loads[-1]), WAIT_SECONDS
            )
            if not held:
                raise TimeoutError(f"no such load after {WAIT_SECONDS} seconds: {self.loads[-1:]}")
            return self.loads[-1]

    def _follow(self, event: KvEvent) -> None:
        match event:
            case BlocksStored(_, hashes):
                self.known.update(hashes)
            case BlocksRemoved(hashes):
                self.known.difference_update(hashes)
