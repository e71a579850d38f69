"""From a model's URL to a folder whose weights int4 keeps: what `kvasir quantize` does."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvasir.worker.calibration.checkpoint import new_folder, write_description, write_weights
from kvasir.worker.calibration.footprint import calibration_footprint
from kvasir.worker.calibration.layers import Calibration
from kvasir.worker.calibration.text import draw_windows, read_tokenizer, standard_docstrings
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.machine import free_memory, usable_cores
from kvasir.worker.model.source import open_source
from kvasir.worker.model.tokenizer_files import TOKENIZER
from kvasir.worker.model.weights import check_weights


@dataclass(frozen=True, slots=True)
class Sample:
    """What of which text the model sees; ``text`` None: docstrings of the standard library."""

    text: str | None
    windows: int
    window: int
    seed: int


def quantize(
    model: str, output: Path, sample: Sample, threads: int, progress: Callable[[str], None]
) -> None:
    """Calibrate the model at a URL and write it to the new folder ``output``.

    Sets torch's thread count for this process; 0: the cores that it may use.

    Raises:
        ModelError: the model, the text or the output cannot be used.
    """
    torch.set_num_threads(threads or usable_cores())
    with new_folder(output) as folder, torch.inference_mode():
        source = open_source(model)
        check_weights(source.weights, source.config)
        if sample.window > source.config.context:
            raise ModelError(
                "window",
                f"{sample.window} is beyond the model's {source.config.context} tokens",
                "give shorter windows",
            )
        _check_memory(source.config, sample)
        text = standard_docstrings() if sample.text is None else sample.text
        tokenizer = read_tokenizer(source.tokenizer_files[TOKENIZER])
        windows = draw_windows(tokenizer, text, sample.windows, sample.window, sample.seed)
        _check_tokens(windows, source.config)
        write_description(folder, model, source)
        calibration = Calibration(source.config, source.weights, windows, progress)
        write_weights(folder, calibration.tensors())


def _check_tokens(windows: Tensor, config: ModelConfig) -> None:
    last = int(windows.max())
    if last >= config.vocab_size:
        raise ModelError(
            TOKENIZER,
            f"token {last} of the text is not among the model's {config.vocab_size} tokens",
            "give the tokenizer that belongs to the model",
        )


def _check_memory(config: ModelConfig, sample: Sample) -> None:
    free = free_memory(torch.device("cpu"))
    if free is None:
        return
    needed = calibration_footprint(config, sample.windows * sample.window)
    if needed.model > free:
        raise ModelError(
            "model",
            f"rounding it takes {needed.model} bytes, more than the {free} bytes free",
            "free memory or use a smaller model",
        )
    if needed.model + needed.streams > free:
        raise ModelError(
            "windows",
            f"{sample.windows} of {sample.window} tokens take {needed.streams} bytes beside the "
            f"model's {needed.model}, more than the {free} bytes free",
            "give fewer or shorter ones with --windows and --window",
        )
