"""Tables of `kvasir bench engine`."""

from collections.abc import Callable, Sequence

from rich.console import Console

from kvasir.bench.engine import Figure
from kvasir.bench.report import spread_cell, table
from kvasir.bench.stats import spread
from kvasir.bench.through_router import Cost

_NOTHING = "-"


def print_figures(console: Console, figures: Sequence[Figure]) -> None:
    """What everyone did, then how ours compare, then what failed."""
    names = list(dict.fromkeys(name for figure in figures for name in figure.values))
    rows = [
        (
            figure.row,
            figure.unit,
            *(_cell(figure.values.get(name, [])) for name in names),
            _cell([v for values in figure.memory_gb_s.values() for v in values]),
        )
        for figure in figures
    ]
    columns = ("", "unit", *names, "memory GB/s")
    console.print(table("Median (range) of runs", columns, rows))
    _print_ratios(console, figures)
    for figure in figures:
        for name, failed in figure.failed.items():
            if failed:
                console.print(f"{figure.row}, {name}: {failed} requests failed")


def _print_ratios(console: Console, figures: Sequence[Figure]) -> None:
    """A row for each of ours that is compared with anyone."""
    compared = [
        (figure.row, name, ratios)
        for figure in figures
        for name, ratios in figure.ratios.items()
        if ratios
    ]
    others = list(dict.fromkeys(other for _, _, ratios in compared for other in ratios))
    rows = [
        (row, name, *(f"{spread_cell(ratios[o])}x" if o in ratios else _NOTHING for o in others))
        for row, name, ratios in compared
    ]
    if rows:
        title = "Times better than another one in the same run: above 1, ours wins"
        console.print(table(title, ("", "", *(f"than {other}" for other in others)), rows))


def print_costs(console: Console, costs: Sequence[Cost]) -> None:
    """Where the time goes between the client and the worker, by requests at once."""
    parts: tuple[tuple[str, Callable[[Cost], float]], ...] = (
        ("seconds", lambda cost: cost.wall_s),
        ("worker CPU s", lambda cost: cost.worker_s),
        ("router CPU s", lambda cost: cost.router_s),
        ("client CPU s", lambda cost: cost.client_s),
    )
    rows = []
    for requests in dict.fromkeys(cost.requests for cost in costs):
        mine = [cost for cost in costs if cost.requests == requests]
        cells = [_cell([pick(cost) for cost in mine]) for _, pick in parts]
        rows.append((f"{requests} concurrent", *cells))
    if rows:
        title = "Through the router: median (range) of whole runs"
        console.print(table(title, ("", *(name for name, _ in parts)), rows))


def _cell(values: Sequence[float]) -> str:
    return spread_cell(spread(values)) if values else _NOTHING
