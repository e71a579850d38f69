"""`kvasir quantize`: rounds a model to int4 with a text, and writes it as a new folder."""

from pathlib import Path
from typing import Any

import click

from kvasir.bench.options import threads_option
from kvasir.bench.report import progress
from kvasir.cli.errors import InvalidInput

_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--model", required=True, help="bundled://NAME, file:///PATH, or a path.")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="A folder that does not exist yet.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plain text, UTF-8, like what the model will read and write. "
    "[default: docstrings of Python's standard library]",
)
@click.option("--windows", type=_COUNT, default=32, show_default=True, help="Of text.")
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the windows.")
@threads_option
def quantize(**given: Any) -> None:
    """Round a model to int4 so that it answers as before, and write it as a new folder.

    The text shows which inputs the weights meet. Serve the folder with `quantization: int4`: its
    weights lie on int4's grid, and workers keep them as they are.
    """
    from kvasir.worker.calibration.quantize import Sample
    from kvasir.worker.calibration.quantize import quantize as run
    from kvasir.worker.model.errors import ModelError

    model: str = given["model"]
    output: Path = given["output"]
    url = model if "://" in model else Path(model).absolute().as_uri()
    try:
        sample = Sample(_read(given["text"]), given["windows"], given["window"], given["seed"])
        with progress() as say:
            run(url, output, sample, given["threads"], say)
    except ModelError as error:
        # Its fields are named as the options are; others are files of the model.
        raise InvalidInput(f"--{error}" if error.field in given else str(error)) from None
    click.echo(f"wrote {output}")
    click.echo(f"serve it with model.source: {output.absolute().as_uri()}")
    click.echo("and model.quantization: int4")


def _read(text: Path | None) -> str | None:
    try:
        return None if text is None else text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"--text: {text} is not UTF-8 ({error}); convert it") from None
