"""The Dispatcher: bounds, counts and serves generations on the fleet.

async with running_dispatcher(config, registry) as dispatcher:
    async for event in dispatcher.generate(generation): ...
"""

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager

from prometheus_client import CollectorRegistry

from kvasir.proto.errors import Reason, Refusal
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import (
    Generation,
    GenerationEvent,
    ModelCard,
    Refused,
    WorkerStatus,
)
from kvasir.router.discovery import WorkersFile, WorkerSource
from kvasir.router.fleet import Fleet
from kvasir.router.kube_discovery import KubernetesWorkers
from kvasir.router.metrics import FleetMetrics, GenerationMetrics
from kvasir.router.placement import Placer
from kvasir.router.serving import QUEUE_RETRY_AFTER, Serving


class FleetDispatcher:
    """Serves generations on the workers that its source names. See contracts.Dispatcher."""

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        rng = rng or random.Random()  # noqa: S311 - breaks ties; nothing secret depends on it
        self._config = config
        self._clock = clock
        self._metrics = GenerationMetrics(registry)
        metrics = FleetMetrics(registry)
        self._fleet = Fleet(config, _source(config), metrics, clock=clock, rng=rng)
        self._placer = Placer(self._fleet, config.disaggregation, rng)
        self._in_flight = 0

    async def start(self) -> None:
        """Begin to connect to the workers; requests may come at once and wait for them.

        Raises SourceError if they can never be found.
        """
        await self._fleet.start()

    async def close(self) -> None:
        """End all sessions. Close the iterators of ``generate`` first."""
        await self._fleet.close()

    async def generate(self, generation: Generation) -> AsyncGenerator[GenerationEvent]:
        """Serve one generation; see contracts.Dispatcher."""
        if self._in_flight >= self._config.queue_limit:
            message = f"{self._in_flight} requests are in flight; try again later."
            yield Refused(Refusal(Reason.QUEUE_FULL, message), QUEUE_RETRY_AFTER)
            return
        serving = Serving(
            generation, self._config, self._fleet, self._placer, self._metrics, self._clock
        )
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            async with aclosing(serving.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)

    def held(self) -> AbstractContextManager[None]:
        """See contracts.Dispatcher."""
        return self._metrics.held(("decode",))

    def model(self) -> ModelCard | None:
        """The served model; None while no worker has ever been seen."""
        return self._fleet.model.card()

    async def tokenizer_files(self) -> dict[str, bytes] | None:
        """File name to content of the model's tokenizer; None while none is known."""
        return await self._fleet.model.tokenizer_files()

    def ready(self) -> bool:
        """Whether a new request could be served now."""
        return bool(self._fleet.decode_groups(None))

    def workers(self) -> list[WorkerStatus]:
        """All listed workers, connected or not."""
        return self._fleet.statuses()


def _source(config: RouterConfig) -> WorkerSource:
    if config.kubernetes is not None:
        return KubernetesWorkers(config.kubernetes)
    if config.workers_file is not None:
        return WorkersFile(config.workers_file)
    raise ValueError("the configuration names no source of workers")


@asynccontextmanager
async def running_dispatcher(
    config: RouterConfig, registry: CollectorRegistry
) -> AsyncIterator[FleetDispatcher]:
    """A dispatcher that is started, and closed at the end. Raises SourceError."""
    dispatcher = FleetDispatcher(config, registry)
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
