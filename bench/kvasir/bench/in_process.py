"""What the commands share that measure the engine in this process: options, model, header."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from kvasir.bench.machine import Machine, describe_machine
from kvasir.bench.options import threads_option
from kvasir.bench.refusals import bad_model, blaming
from kvasir.bench.report import write_json
from kvasir.bench.workload import TokenSource

if TYPE_CHECKING:
    from kvasir.worker.limits import SchedulerConfig
    from kvasir.worker.loader import LoadedModel

P = ParamSpec("P")
R = TypeVar("R")


def quantization_options(function: Callable[P, R]) -> Callable[P, R]:
    """--quantization and --activation-quantization."""
    for option in (
        click.option(
            "--activation-quantization",
            type=click.Choice(["none", "int8"]),
            default="none",
            show_default=True,
        ),
        click.option(
            "--quantization",
            type=click.Choice(["none", "int8", "int4"]),
            default="none",
            show_default=True,
        ),
    ):
        function = option(function)
    return function


def model_options(function: Callable[P, R]) -> Callable[P, R]:
    """--model, --dtype, --threads, and how weights and activations are quantized."""
    for option in (
        threads_option,
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
        ),
        click.option("--model", default="bundled://smollm2-135m-instruct", show_default=True),
    ):
        function = option(function)
    return quantization_options(function)


def computing(said: Mapping[str, str]) -> dict[str, str]:
    """Settings for a report's header, from what a worker's process said that it computes with."""
    return {
        "dtype": said["dtype"],
        "quantization": said["quantization"],
        "threads": said["threads"],
        "computed with": said["with"],
    }


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded model, the scheduler settings that a worker would use, and the report's header."""

    loaded: "LoadedModel"
    scheduler: "SchedulerConfig"
    machine: Machine
    settings: dict[str, Any]

    def write(self, given: Mapping[str, Any], command: str, **parts: Any) -> None:
        """The whole report as JSON, if it was asked for."""
        if given["json_file"] is not None:
            report = {"command": command, "machine": self.machine, "settings": self.settings}
            write_json(given["json_file"], {**report, **parts})


def load(
    given: Mapping[str, Any], say: Callable[[str], None], *, lengths: str = "", **worker: Any
) -> Bench:
    """Load what the options name; ``worker`` are fields of WorkerConfig.

    ``lengths`` are the options that ``max_model_len`` comes from, in words.

    Raises:
        click.BadParameter: the model cannot be loaded; the message says why.
    """
    from kvasir.worker.config import WorkerConfig
    from kvasir.worker.limits import scheduler_config
    from kvasir.worker.loader import load_model
    from kvasir.worker.model.errors import ModelError
    from kvasir.worker.model.machine import usable_cores

    machine = describe_machine()  # before this process is itself the load
    config = WorkerConfig(
        worker_id="bench",
        model=given["model"],
        dtype=given["dtype"],
        quantization=given["quantization"],
        activation_quantization=given["activation_quantization"],
        threads=given["threads"] or usable_cores(),
        **worker,
    )
    try:
        loaded = load_model(config, say)
    except ModelError as error:
        raise bad_model(str(error), lengths) from None
    with blaming("--model"):
        TokenSource("", loaded.vocab_size)  # what is random is drawn from its vocabulary
    settings = {
        "model": config.model,
        "dtype": loaded.layout.dtype,
        "quantization": loaded.layout.quantization,
        "threads": config.threads,
        "block size": config.block_size,
        "sampling": "greedy, ignore_eos",
        "runs": given["runs"],
        "seed": given["seed"],
    }
    return Bench(loaded, scheduler_config(config, loaded), machine, settings)
