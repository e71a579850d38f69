"""Options and output of `kvasir bench quality`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.machine import describe_machine, memory_bandwidth
from kvasir.bench.options import COUNT, FILE, common_options, threads_option
from kvasir.bench.refusals import bad_model, blaming
from kvasir.bench.report import number, output, print_header, progress, table, write_json
from kvasir.bench.workload import (
    WorkloadError,
    question_requests,
    read_questions,
    read_text,
)

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.quality import Figure, Form, Loaded, Questions

_COMMAND = "kvasir bench quality"
_OWN_TEXT = "the language reference that comes with Python (pydoc_data.topics)"


@click.command()
@click.option("--text", type=FILE, help=f"Plain text, UTF-8. [default: {_OWN_TEXT}]")
@click.option("--questions", type=FILE, help="JSON lines with question and answer, as in GSM8K.")
@click.option("--count", type=COUNT, default=100, show_default=True, help="Questions to ask.")
@click.option("--shots", type=click.IntRange(min=0), default=4, show_default=True)
@click.option("--max-tokens", type=COUNT, default=160, show_default=True, help="Of an answer.")
@click.option("--windows", type=COUNT, default=4, show_default=True, help="Of text, in one run.")
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--model", default="bundled://smollm2-135m-instruct", show_default=True)
@click.option("--reference", help="Model that is right, in float32. [default: the same]")
@threads_option
@common_options
def quality(**given: Any) -> None:
    """Compare the model in fewer bits with itself in float32, or with the one it was made from.

    Perplexity on a text, divergence and agreement with float32 there, and right answers to
    questions. Each run takes other windows of the text.
    """
    from kvasir.bench.quality import FORMS, REFERENCE, draw_windows, measure
    from kvasir.bench.trial import TrialError
    from kvasir.router.text.tokenizer import ModelTokenizer, TokenizerError
    from kvasir.worker.config import WorkerConfig
    from kvasir.worker.model.errors import ModelError
    from kvasir.worker.model.source import open_source

    console = output()
    machine = describe_machine()
    try:
        with progress() as say:
            source = open_source(given["model"])
            core = ModelTokenizer.from_files(source.tokenizer_files).core

            def encode(text: str) -> Sequence[int]:
                return core.encode(text, add_special_tokens=False).ids

            _check_window(given["window"], WorkerConfig.model_fields["max_model_len"].default)
            with blaming("--text" if given["text"] is not None else "--windows"):
                tokens = encode(_text(given["text"]))
                runs = [
                    draw_windows(tokens, given["windows"], given["window"], random)
                    for random in (Random(f"{given['seed']}/{run}") for run in range(given["runs"]))
                ]
            with blaming("--questions"):
                questions = _questions(given, encode)
            right = given["reference"] or given["model"]
            if given["reference"] is not None:
                _check_reference(given["reference"])
            models = dict.fromkeys(FORMS, given["model"]) | {REFERENCE: right}
            forms = {
                name: _load(models[name], given["threads"], form, _prefixed(say, name))
                for name, form in FORMS.items()
            }
            memory = memory_bandwidth()
            figures = measure(forms, runs, questions, encode, core.decode, say)
    except (ModelError, TokenizerError) as error:
        raise bad_model(str(error)) from None
    except TrialError as error:
        raise click.ClickException(str(error)) from None
    settings = _settings(given, questions)
    print_header(console, _COMMAND, machine, {**settings, "memory GB/s": number(memory)})
    _print(console, figures)
    if given["json_file"] is not None:
        report = {"command": _COMMAND, "machine": machine, "settings": settings}
        write_json(given["json_file"], {**report, "memory_gb_s": memory, "figures": figures})


def _check_reference(reference: str) -> None:
    """It is loaded with our forms of the model, where a fault would be taken for the model's."""
    from kvasir.worker.model.errors import ModelError
    from kvasir.worker.model.source import open_source

    try:
        open_source(reference)
    except ModelError as error:
        raise click.BadParameter(
            str(error).removeprefix("model: "), param_hint="--reference"
        ) from None


def _check_window(window: int, max_model_len: int) -> None:
    if window > max_model_len:
        raise click.BadParameter(
            f"{window} tokens are more than the engine's longest sequence; give at most"
            f" {max_model_len}",
            param_hint="--window",
        )


def _questions(given: dict[str, Any], encode: Callable[[str], Sequence[int]]) -> "Questions | None":
    """What is asked, if anything is. Raises WorkloadError where it cannot be."""
    from kvasir.bench.quality import Questions
    from kvasir.worker.config import WorkerConfig

    if given["questions"] is None:
        return None
    rows = read_questions(given["questions"])
    # The same check as that of `kvasir bench serve`.
    specs = question_requests(rows, len(rows), given["max_tokens"], given["shots"])
    count = min(given["count"], len(rows) - given["shots"])
    longest = max(len(encode(spec.prompt.text)) for spec in specs[:count])
    room = WorkerConfig.model_fields["max_model_len"].default - given["max_tokens"]
    if longest > room:
        raise WorkloadError(
            f"the longest prompt, {given['shots']} worked examples and a question, has {longest}"
            f" tokens, and beside an answer of --max-tokens {given['max_tokens']} there is room for"
            f" {max(0, room)}; lower either",
            "--shots",
        )
    return Questions(rows, given["shots"], count, given["max_tokens"])


def _prefixed(say: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda line: say(f"{name}: {line}")


def _text(path: Path | None) -> str:
    if path is not None:
        return read_text(path)
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _load(model: str, threads: int, form: "Form", say: Callable[[str], None]) -> "Loaded":
    from kvasir.bench.quality import Loaded
    from kvasir.worker.config import WorkerConfig
    from kvasir.worker.limits import scheduler_config
    from kvasir.worker.loader import load_model
    from kvasir.worker.model.machine import usable_cores

    config = WorkerConfig(
        worker_id="bench",
        model=model,
        dtype=form.dtype,
        quantization=form.quantization,
        activation_quantization=form.activation_quantization,
        threads=threads or usable_cores(),
        prefix_caching=True,
    )
    start = time.perf_counter()
    loaded = load_model(config, say)
    seconds = time.perf_counter() - start
    return Loaded(loaded.runner, scheduler_config(config, loaded), seconds)


def _settings(given: dict[str, Any], questions: "Questions | None") -> dict[str, Any]:
    from kvasir.worker.model.machine import usable_cores

    settings = {name: given[name] for name in ("model", "windows", "window", "seed", "runs")}
    settings["threads"] = given["threads"] or usable_cores()
    if given["reference"] is not None:
        settings["reference"] = given["reference"]
    settings["text"] = _OWN_TEXT if given["text"] is None else given["text"].name
    if questions is not None:
        settings |= {"questions": given["questions"].name, "asked": questions.count}
        settings |= {"shots": questions.shots, "max tokens": questions.max_tokens}
    return settings


def _print(console: "Console", figures: Sequence["Figure"]) -> None:
    columns = ("", "weights MB", "load s", "perplexity", "KL", "same token %", "right answers")
    rows = []
    for figure in figures:
        right = f"{figure.right} of {figure.asked}" if figure.asked else "-"
        rows.append(
            (
                figure.form,
                number(figure.weight_bytes / 1e6),
                number(figure.load_s),
                _precise(figure.perplexity.median, figure.perplexity.low, figure.perplexity.high),
                f"{figure.divergence.median:.5f}",
                f"{100 * figure.agreement.median:.1f}",
                right,
            )
        )
    console.print(table("Against float32. Median (range) of runs", columns, rows))
    console.print(f"Failed requests: {sum(figure.failures for figure in figures)}.")


def _precise(median: float, low: float, high: float) -> str:
    return f"{median:.3f}" if low == high else f"{median:.3f} ({low:.3f} to {high:.3f})"
