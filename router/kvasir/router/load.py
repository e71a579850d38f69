"""The load of one worker: its own reports, and what this router sent that they lack yet.

A request is charged at the moment of choice, long before a report can contain it, so that
a burst does not all go to the worker that was idle a moment ago. A report says how much is
queued in all, but not which requests that contains. Two facts hold anyway:

- the queue is at least what this router has sent and not seen computed;
- the queue is at least the last report plus what this router has sent since.

The larger of the two is taken. Neither counts a request twice; a request that crossed a
report on the wire is still in the first. The same goes for KV tokens. Pure: no I/O, no clock.
"""

from dataclasses import dataclass

from kvasir.router.cost import Weights

RECENT_HALF_LIFE = 30.0
"""Seconds in which what was new to a worker counts half."""


@dataclass(slots=True)
class _Charge:
    prefill_tokens: int
    kv_tokens: int
    after_report: int
    """Number of the last report before the charge."""


class WorkerLoad:
    """One worker's load as this router knows it; all figures in tokens."""

    def __init__(self) -> None:
        self._charges: dict[str, _Charge] = {}
        self._reports = 0
        self._reported_queued = 0
        self._reported_active = 0
        self._sent_queued = 0
        self._sent_active = 0
        self._since_queued = 0
        self._since_active = 0
        self._recent = 0.0

    @property
    def in_flight(self) -> int:
        """Requests of this router on the worker."""
        return len(self._charges)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens accepted, or on the way, and not computed."""
        return max(self._sent_queued, self._reported_queued + self._since_queued)

    @property
    def active_kv_tokens(self) -> int:
        return max(self._sent_active, self._reported_active + self._since_active)

    def cost(self, weights: Weights) -> float:
        """The part of a choice's cost that does not depend on the prompt."""
        return (
            self.queued_prefill_tokens
            + weights.active * self.active_kv_tokens
            + weights.recent * self._recent
        )

    def charge(
        self, request_id: str, *, prefill_tokens: int, kv_tokens: int, new_tokens: int
    ) -> None:
        """A request is sent to the worker.

        Args:
            request_id: released under the same id.
            prefill_tokens: prompt tokens that the worker is going to compute.
            kv_tokens: tokens whose KV it will hold for the request.
            new_tokens: of these, the ones that it does not hold yet.
        """
        if request_id in self._charges:
            raise ValueError(f"request {request_id} is already charged")
        self._charges[request_id] = _Charge(prefill_tokens, kv_tokens, self._reports)
        self._sent_queued += prefill_tokens
        self._sent_active += kv_tokens
        self._since_queued += prefill_tokens
        self._since_active += kv_tokens
        self._recent += new_tokens

    def computed(self, request_id: str) -> None:
        """The request's prompt is computed: its first token is here."""
        charge = self._charges.get(request_id)
        if charge is None:
            return
        self._sent_queued -= charge.prefill_tokens
        if charge.after_report == self._reports:
            self._since_queued -= charge.prefill_tokens
        charge.prefill_tokens = 0

    def release(self, request_id: str) -> None:
        """The request is over on this worker. Unknown ids are fine."""
        self.computed(request_id)
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return
        self._sent_active -= charge.kv_tokens
        if charge.after_report == self._reports:
            self._since_active -= charge.kv_tokens

    def report(self, queued_prefill_tokens: int, active_kv_tokens: int) -> None:
        """The worker's own figures, for the requests of all routers."""
        self._reports += 1
        self._reported_queued = queued_prefill_tokens
        self._reported_active = active_kv_tokens
        self._since_queued = 0
        self._since_active = 0

    def decay(self, seconds: float) -> None:
        """Time passes: what was new becomes old."""
        self._recent *= 0.5 ** (seconds / RECENT_HALF_LIFE)
