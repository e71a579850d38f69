"""Bad input, told in the options of the command that it was given to: exit code 2.

The engine and its worker name fields of WorkerConfig, of which a bench sets some by its options
and others by itself. What is merely not there, or breaks on the way, is no matter of this module.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import click

from kvasir.bench.workload import WorkloadError

_OPTIONS: Mapping[str, str] = {
    "model": "--model",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "activation_quantization": "--activation-quantization",
    "threads": "--threads",
}
_FIELD_AT_FAULT = re.compile(r"([a-z_]+): ")
# `model`, `dtype` and `quantization` are words, too; a name in a path is part of the path.
_FIELD = re.compile(rf"(?<![\w./-])({'|'.join(n for n in _OPTIONS if '_' in n)})(?![\w/-])")


@contextmanager
def blaming(option: str) -> Iterator[None]:
    """A WorkloadError within is this option's fault, unless it names another one itself."""
    try:
        yield
    except WorkloadError as error:
        raise click.BadParameter(str(error), param_hint=error.option or option) from None


def bad_model(message: str, lengths: str = "") -> click.BadParameter:
    """Why a model cannot be loaded as the options say.

    Args:
        message: ``field: problem; fix``, of a ModelError or of a worker that did not start.
        lengths: the options that set the longest sequence, in words; "" if none does.
    """
    at_fault = _FIELD_AT_FAULT.match(message)
    field = at_fault[1] if at_fault is not None else ""
    text = message[len(field) + 2 :]
    problem, _, _ = text.rpartition("; ")
    match field:
        case "max_model_len" if lengths:
            told = f"prompt and output together: {problem}; give less"
            return click.BadParameter(told, param_hint=lengths)
        case "max_model_len" | "kv_cache_memory":
            lower = f", or lower {lengths}" if lengths and field == "kv_cache_memory" else ""
            known = "KV cache: " if field == "kv_cache_memory" else "longest sequence: "
            told = f"{known}{problem.replace('max_model_len ', '')}; use another model{lower}"
            return click.BadParameter(told, param_hint="--model")
        case _ if field in _OPTIONS:
            told = _FIELD.sub(lambda found: _OPTIONS[found[1]], text)
            return click.BadParameter(told, param_hint=_OPTIONS[field])
    # A file of the model is at fault.
    return click.BadParameter(message, param_hint="--model")
