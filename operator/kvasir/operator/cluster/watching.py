"""Runs the watches and the queue that they fill, side by side: without either, nothing is kept.

kopf ends when one of its tasks fails, but first waits for the others, and may do so for ever. So
its tasks are looked at from here, and whatever it then still waits for is left behind.
"""

import asyncio
import logging
from collections.abc import Sequence

import kopf

from kvasir.operator.cluster import handlers
from kvasir.operator.cluster.queue import Queue

_GRACE = 15.0
"""Seconds for kopf to end by itself."""


class WatchingEndedError(Exception):
    """Changes are not seen any more, or not acted on; only a new process helps."""


async def watch(
    queue: Queue, registry: kopf.OperatorRegistry, namespaces: Sequence[str], identity: str
) -> None:
    """Until a signal comes, or cancelled. Watches all namespaces if none is named.

    Raises:
        WatchingEndedError: something failed that should never end.
    """
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of each event that it handles
    others = asyncio.all_tasks()
    reconciling = asyncio.create_task(queue.run(), name="queue")
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=handlers.settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        # Left to itself, kopf asks for the user's name; a pod's user may have none.
        identity=identity,  # type: ignore[arg-type]  # its type has no public name
    )
    watching = asyncio.create_task(kopf.run_tasks(tasks, ignored={*others, reconciling}))
    try:
        ended, _ = await asyncio.wait([*tasks, reconciling], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if task.cancelled() or task.exception() is not None:
                error = None if task.cancelled() else task.exception()
                raise WatchingEndedError(f"{task.get_name()} ended: {error!r}") from error
        await asyncio.wait([watching], timeout=_GRACE)
    finally:
        watching.cancel()
        reconciling.cancel()
        await asyncio.wait([watching, reconciling], timeout=_GRACE)
