"""Who may be chosen now, and at what cost: the tables that a choice walks.

Kept up to date at every change, so that a choice looks at each worker once and computes
nothing about it. Pure: no I/O, no clock.
"""

from collections.abc import Iterator

from kvasir.router.cost import DECODE_WEIGHTS, PREFILL_WEIGHTS, Group, Standing
from kvasir.router.load import WorkerLoad

Loads = dict[str, float]
"""Worker -> cost of its load."""


class Pools:
    """Eligible workers by group, for decode and for prefill."""

    def __init__(self) -> None:
        self._decode: dict[Group, Loads] = {}
        self._prefill: dict[Group, Loads] = {}
        self._places: dict[str, tuple[dict[Group, Loads], Group]] = {}

    def update(self, worker: str, group: Group, standing: Standing, load: WorkerLoad) -> bool:
        """Put a worker where it belongs now. Whether it became eligible by this."""
        if standing.may_decode:
            table, cost = self._decode, load.cost(DECODE_WEIGHTS)
        elif standing.may_prefill:
            table, cost = self._prefill, load.cost(PREFILL_WEIGHTS)
        else:
            self.remove(worker)
            return False
        before, place = self._places.get(worker), (table, group)
        moved = before is None or before[0] is not table or before[1] != group
        if moved:
            self.remove(worker)
            self._places[worker] = place
        table.setdefault(group, {})[worker] = cost
        return moved

    def remove(self, worker: str) -> None:
        """A worker may not be chosen any longer. Unknown ones are fine."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        table, group = place
        del table[group][worker]
        if not table[group]:
            del table[group]

    def decode(self) -> Iterator[tuple[Group, Loads]]:
        yield from self._decode.items()

    def prefill(self, group: Group) -> Loads:
        return self._prefill.get(group, {})
