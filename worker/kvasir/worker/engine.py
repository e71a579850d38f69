"""The engine thread: plan, execute, update, tell; and the only door to it for other threads.

Owns the thread, the scheduler and the runner; what it tells, and to whom, is Delivery's. Every
change happens on the engine thread, between two steps, in the order of the calls: other threads
only queue commands. A step never waits for I/O; with nothing to compute, the thread sleeps until
a command or a deadline comes.

Whatever is raised on the engine thread, by the runner, a sink or an invariant check, ends the
engine: all futures fail and ``on_fatal`` is called. There is no state to go on from. After
``stop``, calls are answered at once, as for requests that are gone, and nobody is told anything.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvasir.proto.errors import Reason, Refusal
from kvasir.worker.calls import Call, run_all
from kvasir.worker.contracts import EngineListener, Load, OutputSink, Request, Runner, Sampled
from kvasir.worker.delivery import Delivery
from kvasir.worker.scheduler import Scheduler
from kvasir.worker.turns import Turns

T = TypeVar("T")


class Engine:
    """Runs a scheduler and a runner until ``stop``.

    Args:
        scheduler: fresh, and used by nobody else from now on.
        runner: with as many blocks as the scheduler's config says.
        listener: told of KV events and load.
        clock: seconds since the Unix epoch.
        stopwatch: monotonic seconds, for how long steps take.
        on_fatal: told, on the engine thread, why the engine has ended by itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        listener: EngineListener,
        *,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        if runner.num_blocks != scheduler.config.num_blocks:
            raise ValueError(
                f"the runner has {runner.num_blocks} blocks, the scheduler "
                f"{scheduler.config.num_blocks}"
            )
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._stopwatch = stopwatch
        self._on_fatal = on_fatal
        self._turns = Turns(stopwatch)
        self._delivery = Delivery(scheduler, listener, self._turns)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._unchecked = False  # requests have come since the last invariant check

        self._wake = threading.Condition()  # guards everything below
        self._commands: list[Call[Any]] = []
        self._draining = False
        self._stopping = False
        self._ended = False
        self._fatal: BaseException | None = None

    # --- any thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in; what still runs is told ABORTED. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._run()  # never started: nothing runs, but what was submitted must hear of it
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, request: Request, sink: OutputSink) -> Refusal | None:
        """Accept a request, whose news then goes to ``sink``, or say why not.

        ``sink`` is a ReceiveSink for Work.RECEIVE and a HoldSink for Work.PREFILL.
        """
        config = self._scheduler.config
        if (refusal := config.refusal(request)) is not None:
            return refusal
        with self._wake:
            if self._ended or self._stopping:
                return Refusal(Reason.INTERNAL, "This worker's engine has ended.")
            if self._draining:
                return Refusal(
                    Reason.DRAINING, "This worker is draining; send the request to another one."
                )
            if request.request_id in self._delivery:
                return Refusal(
                    Reason.INVALID_REQUEST,
                    f"A request with the id {request.request_id} is still being served.",
                    "request_id",
                )
            waiting = self._delivery.num_waiting
            if waiting >= config.max_waiting_requests:
                return Refusal(
                    Reason.QUEUE_FULL,
                    f"{waiting} requests wait for this worker already; retry later.",
                )
            self._delivery.accept(request, sink)
            self._queue(lambda: self._add(request))
        return None

    def abort(self, request_id: str) -> None:
        """End a request, if it is still alive, and free its blocks."""
        with self._wake:
            self._queue(lambda: self._abort(request_id))

    def release(self, request_id: str) -> None:
        """End the hold of a Work.PREFILL request, computed or not, and free its blocks."""
        self.abort(request_id)

    def commit_blocks(self, request_id: str, first_block: int, payload: memoryview) -> Future[bool]:
        """Write verified KV into whole blocks of a receiving request.

        Args:
            request_id: of a Work.RECEIVE request whose sink has been told ``reserved``.
            first_block: index in the request's block table.
            payload: whole blocks, in order; must stay unchanged until the future is done.

        Returns:
            True when written; False if the request is gone. The future fails with
            BlockRangeError if these blocks are not the request's to fill.
        """
        count, rest = divmod(payload.nbytes, self._runner.block_bytes)
        if rest:
            raise ValueError(
                f"{payload.nbytes} bytes are not whole blocks of {self._runner.block_bytes}"
            )
        with self._wake:
            return self._queue(lambda: self._commit(request_id, first_block, count, payload))

    def finish_receive(self, request_id: str, sampled: Sampled, holder_cached_tokens: int) -> None:
        """All KV of the prompt is committed, and this is the first token."""
        with self._wake:
            self._queue(
                lambda: self._scheduler.handover.finish_receive(
                    request_id, sampled, holder_cached_tokens
                )
            )

    def fail_receive(self, request_id: str, *, peer_fault: bool = False) -> None:
        """No more KV comes: compute what follows the contiguous committed blocks here.

        ``peer_fault``: it is the prefill worker's fault; told with the first output.
        """
        with self._wake:
            self._queue(
                lambda: self._scheduler.handover.fail_receive(request_id, peer_fault=peer_fault)
            )

    def read_blocks(
        self, request_id: str, first_block: int, count: int
    ) -> Future[memoryview | None]:
        """Copy KV of a Work.PREFILL request out; None if the request is gone.

        The future fails with BlockRangeError if ``progress`` has not told of these blocks yet.
        """
        with self._wake:
            return self._queue(lambda: self._read(request_id, first_block, count))

    def snapshot(self, tell: Callable[[int, list[bytes]], None]) -> None:
        """Have ``tell`` called with the number of the last KV event and all hashes known then.

        On the engine thread, as a sink is, and in its place among the events: after those
        that it contains and before all later ones. Never, if the engine ends before that.
        """
        with self._wake:
            self._queue(lambda: self._delivery.snapshot(tell))

    def set_draining(self, draining: bool) -> None:
        """Whether to refuse new requests; those accepted go on."""
        with self._wake:
            self._draining = draining

    def load(self) -> Load:
        """As of the last step; a request counts from the moment it was accepted."""
        return self._delivery.load()

    @property
    def turn_seconds(self) -> float:
        """How long the thread has been at one turn, a step at most; 0 while it has no work."""
        return self._turns.seconds

    # --- the engine thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            idle = False
            while self._take_commands(idle):
                idle = not self._step()
            self._finish()
        except BaseException as error:  # noqa: BLE001 - whatever it is, on_fatal gets it
            with self._wake:
                self._fatal = error
            self._end()
            self._on_fatal(error)
        else:
            self._end()

    def _take_commands(self, idle: bool) -> bool:
        """Run the queued commands; wait for one if ``idle``. False when it is time to stop."""
        with self._wake:
            self._turns.end()
            if idle and not self._commands and not self._stopping:
                deadline = self._scheduler.next_deadline()
                wait = None if deadline is None else max(deadline - self._clock(), 0.0)
                self._wake.wait(wait if wait is None else min(wait, threading.TIMEOUT_MAX))
            self._turns.begin()
            commands, self._commands = self._commands, []
            stopping = self._stopping
        run_all(commands)
        return not stopping

    def _step(self) -> bool:
        """One step; False if there was nothing to compute."""
        plan = self._scheduler.plan(self._clock())
        self._delivery.tell_signals()
        if plan.chunks:
            start = self._stopwatch()
            result = self._runner.execute(plan)
            self._scheduler.update(plan, result, self._stopwatch() - start)
        elif self._unchecked and not self._scheduler.request_ids():
            self._scheduler.check()
            self._unchecked = False
        self._delivery.tell()
        return bool(plan.chunks)

    def _finish(self) -> None:
        for request_id in self._scheduler.request_ids():
            self._scheduler.abort(request_id)
        self._scheduler.check()
        self._delivery.tell()

    def _end(self) -> None:
        """From here on, calls are settled at once: see ``_queue``."""
        with self._wake:
            self._turns.end()
            self._ended = True
            self._delivery.end()
            commands, self._commands = self._commands, []
            for command in commands:
                self._settle(command)

    # --- commands, on the engine thread ------------------------------------------------------

    def _queue(self, function: Callable[[], T]) -> Future[T]:
        """Have the engine thread do something. The caller holds the lock."""
        call = Call(function, Future())
        if self._ended:
            self._settle(call)
        else:
            self._commands.append(call)
            self._wake.notify()
        return call.future

    def _settle(self, call: Call[Any]) -> None:
        """Answer a call that comes after the end: the thread is gone, and so is every request."""
        if self._fatal is None:
            call.run()
        else:
            call.fail(self._fatal)

    def _add(self, request: Request) -> None:
        self._unchecked = True
        self._scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        if self._scheduler.abort(request_id):
            self._delivery.forget(request_id)

    def _commit(self, request_id: str, first_block: int, count: int, payload: memoryview) -> bool:
        blocks = self._scheduler.handover.receivable(request_id, first_block, count)
        if blocks is None:
            return False
        self._runner.write_blocks(blocks, payload)
        self._scheduler.handover.committed(request_id, first_block, count)
        return True

    def _read(self, request_id: str, first_block: int, count: int) -> memoryview | None:
        found = self._scheduler.handover.readable(request_id, first_block, count)
        return None if found is None else self._runner.read_blocks(*found)
