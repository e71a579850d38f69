"""The router core's Prometheus metrics, in a registry that the caller passes in.

Label values are bounded: states and decisions are closed sets, and the series of
a worker that has left are deleted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

HeldRole = Literal["prefill", "decode"]

STATES = ("connecting", "ready", "incompatible", "draining", "lost")


class GenerationMetrics:
    """What the dispatcher counts of generations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.in_flight = Gauge(
            "kvasir_router_generations_in_flight",
            "Generations that wait for a worker or are being served.",
            registry=registry,
        )
        self._held = Gauge(
            "kvasir_router_held_requests",
            "Generations, and requests before that, that wait for a worker to come, by the roles "
            "that they need workers of; one with a long prompt counts for both.",
            ["role"],
            registry=registry,
        )
        for role in ("prefill", "decode"):
            self._held.labels(role)
        self.replays = Counter(
            "kvasir_router_replays_total",
            "Submits of a generation again after its worker was lost.",
            registry=registry,
        )
        self.retries = Counter(
            "kvasir_router_retries_total",
            "Submits to another worker after one refused.",
            registry=registry,
        )
        self.choice_seconds = Histogram(
            "kvasir_router_choice_seconds",
            "Time to choose the workers of one generation, prompt hashing included.",
            buckets=(5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1),
            registry=registry,
        )
        self.disaggregated = Counter(
            "kvasir_router_disaggregated_total",
            "Choices by where the prompt is computed and why.",
            ["decision"],
            registry=registry,
        )

    @contextmanager
    def held(self, roles: Sequence[HeldRole]) -> Iterator[None]:
        """Counts a request as held while the block runs."""
        for role in roles:
            self._held.labels(role).inc()
        try:
            yield
        finally:
            for role in roles:
                self._held.labels(role).dec()


class FleetMetrics:
    """What the fleet counts of workers, and of the prefix index that it keeps of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.index_bytes = Gauge(
            "kvasir_router_prefix_index_bytes",
            "Estimated memory of the prefix index.",
            registry=registry,
        )
        self.index_blocks = Gauge(
            "kvasir_router_prefix_index_blocks",
            "Distinct blocks in the prefix index.",
            registry=registry,
        )
        self.resyncs = Counter(
            "kvasir_router_resyncs_total",
            "Snapshots asked for because KV events were missing.",
            ["worker"],
            registry=registry,
        )
        self.discovery_current = Gauge(
            "kvasir_router_discovery_current",
            "1 while the list of workers is known to be true; 0 while the last known one is used "
            "because its source cannot be read.",
            registry=registry,
        )
        self.workers = Gauge(
            "kvasir_router_workers",
            "Known workers by state.",
            ["state"],
            registry=registry,
        )
        self.worker_in_flight = Gauge(
            "kvasir_router_worker_in_flight",
            "Generations of this router that a worker computes or decodes.",
            ["worker"],
            registry=registry,
        )

    def count_workers(self, by_state: Mapping[str, int]) -> None:
        for state in STATES:
            self.workers.labels(state).set(by_state.get(state, 0))

    def forget_worker(self, worker_id: str) -> None:
        """Delete the series of a worker that has left."""
        for metric in (self.resyncs, self.worker_in_flight):
            metric.remove(worker_id)
