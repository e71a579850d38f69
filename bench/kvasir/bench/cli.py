"""The `kvasir bench` command group."""

from typing import Any

import click

from kvasir.bench.batching_command import batching
from kvasir.bench.chunking_command import chunking
from kvasir.bench.disaggregation_command import disaggregation
from kvasir.bench.engine_command import engine
from kvasir.bench.exact_command import exact
from kvasir.bench.kv_command import kv
from kvasir.bench.prefix_command import prefix
from kvasir.bench.quality_command import quality
from kvasir.bench.serve_command import serve
from kvasir.bench.signals import ended_by_signals
from kvasir.bench.speculation_command import speculation
from kvasir.bench.startup_command import startup


class _Bench(click.Group):
    """Its commands clean up after SIGTERM and SIGHUP, too."""

    def invoke(self, ctx: click.Context) -> Any:
        with ended_by_signals():
            return super().invoke(ctx)


@click.group(cls=_Bench)
def bench() -> None:
    """Measure a server or the engine, and check exactness.

    Every figure comes with the machine it was measured on, the number of failures, and the
    memory bandwidth of the moment.
    """


bench.add_command(serve)
bench.add_command(engine)
bench.add_command(exact)
bench.add_command(batching)
bench.add_command(chunking)
bench.add_command(prefix)
bench.add_command(kv)
bench.add_command(disaggregation)
bench.add_command(speculation)
bench.add_command(quality)
bench.add_command(startup)
