"""What the bundled model is said to take in memory, against what loading it takes and who may."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from helpers.models import load
from kvasir.worker import loader
from kvasir.worker.loader import ModelError
from kvasir.worker.model.footprint import footprint
from kvasir.worker.model.quantization import Quantization
from kvasir.worker.model.source import open_source

BUNDLED = "bundled://smollm2-135m-instruct"

# Prints by how many bytes the process grew at the most while it loaded the bundled model.
GROWTH = """
import sys, re
from pathlib import Path
from helpers.models import load
import torch

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.ones(64, 64) @ torch.ones(64, 64)
before = status("VmRSS")
load("bundled://smollm2-135m-instruct", dtype="bfloat16", quantization=sys.argv[1],
     kv_cache_memory=16 * 2**20)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("form", ["none", "int8", "int4"])
def test_loading_takes_no_more_than_is_said(form: Literal["none", "int8", "int4"]) -> None:
    done = subprocess.run(
        (sys.executable, "-c", GROWTH, form),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
    )
    quantization = Quantization(form)
    config = open_source(BUNDLED).config
    weights = footprint(config, torch.bfloat16, quantization, packed=True)
    other = 64 * 2**20  # the cache, the tokenizer's files, code that is read on first use
    assert weights.resident < int(done.stdout) < weights.loading + other


def test_what_quantization_saves_may_go_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """800 MB are too few for 269 MB of bfloat16 and a cache of 600 MB, but not for int8."""
    monkeypatch.setattr(loader, "free_memory", lambda _: 800_000_000)
    load(BUNDLED, dtype="bfloat16", quantization="int8", kv_cache_memory=600_000_000)
    with pytest.raises(ModelError, match=r"^kv_cache_memory: 600000000 bytes and 2691") as caught:
        load(BUNDLED, dtype="bfloat16", kv_cache_memory=600_000_000)
    assert "exceed the 800000000 bytes free on cpu" in str(caught.value)


def test_a_model_that_can_be_held_but_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_memory", lambda _: 300_000_000)
    with pytest.raises(ModelError, match=r"^model: reading its weights takes 6") as caught:
        load(BUNDLED, dtype="bfloat16", quantization="int8", kv_cache_memory=20_000_000)
    assert "more than the 300000000 bytes free on cpu; free memory or" in str(caught.value)
