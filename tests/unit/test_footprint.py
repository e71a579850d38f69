"""What a model is said to take in memory, against what its decoders hold."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from helpers.models import load, save_tiny
from kvasir.worker import loader
from kvasir.worker.kernels.library import Kernels, Unavailable, find_kernels
from kvasir.worker.model.footprint import footprint
from kvasir.worker.model.quantization import Quantization
from kvasir.worker.model.source import open_source

FORMS = ("none", "int8", "int4")


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [True, False])
def test_resident_is_what_the_decoder_holds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    form: Literal["none", "int8", "int4"],
    *,
    packed: bool,
) -> None:
    if packed and not isinstance(find_kernels(), Kernels):
        pytest.skip("NO CPU KERNELS TO TEST")
    if not packed:
        monkeypatch.setattr(loader, "find_kernels", lambda: Unavailable("a test"))
    save_tiny(kind, tmp_path)
    url = f"file://{tmp_path}"
    held = load(url, dtype="bfloat16", quantization=form).runner.weight_bytes
    quantization = Quantization(form)
    model = open_source(url).config
    said = footprint(model, torch.bfloat16, quantization, packed=packed).resident
    norms_and_biases = 4 * model.num_layers * (4 * 48 + 2 * 80)
    # Whether bfloat16 can be coded in 12 bits is known only when it is read.
    uncoded = held * 4 / 3 if packed and form == "none" else held
    assert held <= said <= uncoded * 1.05 + norms_and_biases
