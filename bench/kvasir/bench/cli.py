"""The `kvasir bench` command group."""

import click

from kvasir.bench.engine_command import engine
from kvasir.bench.exact_command import exact
from kvasir.bench.serve_command import serve


@click.group()
def bench() -> None:
    """Measure a server or the engine, and check exactness.

    Every figure comes with the machine it was measured on, the number of failures, and the
    memory bandwidth of the moment.
    """


bench.add_command(serve)
bench.add_command(engine)
bench.add_command(exact)
