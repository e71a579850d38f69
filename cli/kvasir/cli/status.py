"""`kvasir status`: the router's view of its workers, as a table or JSON."""

import json
import os
from collections.abc import Mapping
from typing import Any

import click
from rich.table import Table

from kvasir.cli.client import RouterChoice, router_options
from kvasir.cli.console import output
from kvasir.operator.local.state import metrics_urls, state_root


@click.command()
@router_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(router: RouterChoice, as_json: bool) -> None:
    """Show each worker: role, state, requests running and waiting, KV use, prefix hit rate.

    KV USE counts blocks that running requests hold; the prefix cache fills what is left and
    is given up when room is needed. KV WASTE is the part of their room that no token fills or
    is about to fill. ACCEPTED, where workers speculate, is the share of drafted tokens that were
    right. Where `kvasir up` runs on this machine, the addresses of Prometheus metrics follow;
    with --json they are metrics_url.
    """
    client = router.client()
    workers = client.get("/workers")
    metrics = metrics_urls(state_root(os.environ), client.url)
    if as_json:
        rows = [row | {"metrics_url": metrics.get(row["worker_id"])} for row in workers]
        told = {"url": client.url, "metrics_url": f"{client.url}/metrics", "workers": rows}
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(client.url)
    if not workers:
        click.echo("no workers yet; they appear when their model is loaded")
        return
    output().print(_table(workers))
    for line in _metrics_lines(metrics):
        click.echo(line)


def _metrics_lines(urls: Mapping[str, str]) -> list[str]:
    """One line for each process that tells where its metrics are."""
    if not urls:
        return []
    return ["", "Metrics:", *(f"  {url} ({name})" for name, url in sorted(urls.items()))]


def _table(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("WORKER", "ROLE", "STATE"):
        table.add_column(heading, no_wrap=True)
    headings = ["RUNNING", "WAITING", "KV USE", "KV WASTE", "PREFIX HITS"]
    speculating = any(map(_drafted, workers))  # without it, the table fits into 80 columns
    if speculating:
        headings.append("ACCEPTED")
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right")
    for worker in sorted(workers, key=lambda worker: str(worker["worker_id"])):
        state = worker["state"]
        table.add_row(
            worker["worker_id"],
            worker["role"],
            state if state == "ready" else f"[yellow]{state}[/yellow]",
            str(worker["running"]),
            str(worker["waiting"]),
            _share(worker["kv_blocks_used"], worker["kv_blocks_total"]),
            _waste(worker),
            _share(worker["prefix_hit_tokens"], worker["prefix_query_tokens"]),
            *([_acceptance(worker)] if speculating else []),
        )
    return table


def _waste(worker: dict[str, Any]) -> str:
    wasted = worker["kv_slots_internal_waste"] + worker["kv_slots_external_waste"]
    return _share(wasted, worker["kv_slots_filled"] + worker["kv_slots_reserved"] + wasted)


def _drafted(worker: dict[str, Any]) -> int:
    """Tokens; none to a router that does not know of speculation yet."""
    return int(worker.get("draft_tokens", 0))


def _acceptance(worker: dict[str, Any]) -> str:
    return _share(worker.get("accepted_tokens", 0), _drafted(worker))


def _share(part: int, whole: int) -> str:
    """A percentage, or a dash where there is nothing to divide by."""
    return f"{100 * part / whole:.1f}%" if whole else "-"
