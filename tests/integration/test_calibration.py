"""Calibrated int4 of whole models: how far it is from the exact one, and what stays."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from helpers.models import TINY, bundled_folder, load
from helpers.word_models import save_worded, word_ids, word_text
from kvasir.cli.commands import cli
from kvasir.cli.errors import run
from kvasir.worker.calibration.checkpoint import write_description
from kvasir.worker.calibration.footprint import calibration_footprint
from kvasir.worker.calibration.layers import Calibration, Streams
from kvasir.worker.calibration.quantize import Sample, quantize
from kvasir.worker.model.quantization import quantize_int4
from kvasir.worker.model.source import open_source

SAMPLE = Sample(word_text(6000, seed=1), windows=64, window=64, seed=0)

OTHER_WEIGHTS = (
    *("tf_model.h5", "flax_model.msgpack", "model.onnx", "model.onnx_data", "rust_model.ot"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.Q8.gguf"),
)


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("kind", list(TINY))
def test_exact_stream_is_the_model(tmp_path: Path, kind: str) -> None:
    """The calibration's own forward pass ends where the decoder's does, for each architecture."""
    save_worded(kind, tmp_path)
    source = open_source(f"file://{tmp_path}")
    windows = torch.tensor([word_ids(40, seed) for seed in (3, 4)])
    calibration = Calibration(source.config, source.weights, windows, quiet)
    hidden = source.weights.read("model.embed_tokens.weight").float()[windows.flatten()]
    streams = Streams(hidden, hidden)
    for layer in range(source.config.num_layers):
        streams = calibration._layer(layer, streams, {})
    head = "model.embed_tokens" if source.config.tied_embeddings else "lm_head"
    norm = source.weights.read("model.norm.weight")
    rows = torch.nn.functional.rms_norm(streams.exact, norm.shape, norm, source.config.rms_norm_eps)
    logits = rows @ source.weights.read(f"{head}.weight").T
    runner = load(f"file://{tmp_path}").runner
    exact = torch.cat([runner.logits(window) for window in windows.tolist()])
    assert (logits - exact).norm() < 1e-4 * exact.norm()
    # The rounded stream went another way, but not far.
    assert 1e-4 < (streams.rounded - streams.exact).norm() / streams.exact.norm() < 0.5


def test_the_embedding_is_let_go_after_its_lookup(tmp_path: Path) -> None:
    save_worded("llama", tmp_path)
    source = open_source(f"file://{tmp_path}")
    read: dict[str, weakref.ref[Tensor]] = {}

    class Watched:
        shapes = source.weights.shapes

        def read(self, name: str) -> Tensor:
            values = source.weights.read(name).float()
            read[name] = weakref.ref(values)
            return values

    windows = torch.tensor([word_ids(40, seed=3)])
    tensors = Calibration(source.config, Watched(), windows, quiet).tensors()
    next(tensors)
    assert read["model.embed_tokens.weight"]() is None


# Prints by how many bytes the process grew at the most while it calibrated a model.
GROWTH = """
import re, sys
from pathlib import Path
import torch
from helpers.word_models import word_text
from kvasir.worker.calibration.quantize import Sample, quantize

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

sample = Sample(word_text(70000, seed=1), windows=128, window=512, seed=0)
torch.linalg.cholesky(torch.eye(64).double() @ torch.eye(64).double())
before = status("VmRSS")
quantize(sys.argv[1], Path(sys.argv[2]), sample, 1, lambda _: None)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_calibration_takes_the_memory_that_is_said(tmp_path: Path) -> None:
    save_worded("llama", tmp_path / "given")
    url = f"file://{tmp_path}/given"
    done = subprocess.run(
        (sys.executable, "-c", GROWTH, url, tmp_path / "made"),
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[1],
    )
    needed = calibration_footprint(open_source(url).config, 128 * 512)
    # The text and its tokens, code that is read on first use, pages that the allocator keeps;
    # less than the streams once more.
    other = 96 * 2**20 + 0.4 * needed.streams
    assert 0.9 * needed.streams < int(done.stdout) < needed.model + needed.streams + other


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what `kvasir quantize` makes of it."""
    root = tmp_path_factory.mktemp("calibrated")
    save_worded("llama", root / "given")
    (root / "given" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in OTHER_WEIGHTS:
        (root / "given" / name).write_bytes(b"of another framework")
    config = json.loads((root / "given" / "config.json").read_text())
    config["max_position_embeddings"] = 2048  # what workers take by default
    (root / "given" / "config.json").write_text(json.dumps(config))
    quantize(f"file://{root}/given", root / "made", SAMPLE, 1, quiet)
    return root / "given", root / "made"


def divergence(found: Tensor, exact: Tensor) -> float:
    found, exact = found.log_softmax(-1), exact.log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_calibrated_is_closer_than_rounded(folders: tuple[Path, Path]) -> None:
    """On text of the same kind that was not seen, as served: embedding and output in int8."""
    given, made = folders
    tokens = word_ids(250, seed=2)
    exact = load(f"file://{given}").runner.logits(tokens)
    plain = load(f"file://{given}", quantization="int4").runner.logits(tokens)
    calibrated = load(f"file://{made}", quantization="int4").runner.logits(tokens)
    assert divergence(calibrated, exact) < 0.6 * divergence(plain, exact)


def test_every_matrix_is_kept_by_int4_and_nothing_else_changes(
    folders: tuple[Path, Path],
) -> None:
    given, made = (open_source(f"file://{folder}").weights for folder in folders)
    assert given.shapes() == made.shapes()
    for name in given.shapes():
        exact, weight = given.read(name).float(), made.read(name)
        assert weight.dtype is torch.float32
        if "_proj.weight" in name:
            assert not torch.equal(weight, exact)
            assert torch.equal(quantize_int4(weight).dequantized(), weight)
        else:
            assert torch.equal(weight, exact)


def test_transformers_reads_the_same_model(folders: tuple[Path, Path]) -> None:
    _, made = folders
    auto: Any = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(made)
    tokens = word_ids(50, seed=8)
    with torch.no_grad():
        exact = reference(torch.tensor([tokens])).logits[0]
    found = load(f"file://{made}").runner.logits(tokens)
    assert (found - exact).abs().max() < 1e-4


def test_files_beside_the_weights_come_along(folders: tuple[Path, Path]) -> None:
    given, made = folders
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (made / name).read_bytes() == (given / name).read_bytes()
    assert not [name for name in OTHER_WEIGHTS if (made / name).exists()]
    before, after = (json.loads((f / "config.json").read_text()) for f in folders)
    assert after["dtype"] == "float32"
    assert {**before, "dtype": "float32"} == after
    assert not [entry for entry in made.parent.iterdir() if entry.name.startswith(".")]
    weights = [file for file in made.iterdir() if file.suffix == ".safetensors"]
    assert {file.stat().st_mode & 0o777 for file in weights} == {0o644}
    assert sum(len(load_file(file)) for file in weights) == len(
        open_source(f"file://{made}").weights.shapes()
    )


def test_the_command_writes_a_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    given, _ = folders
    (tmp_path / "text.txt").write_text(word_text(600, seed=4))
    arguments = ["--model", str(given), "--output", str(tmp_path / "new"), "--threads", "1"]
    arguments += ["--text", str(tmp_path / "text.txt"), "--windows", "8", "--window", "64"]
    assert run(cli, ["quantize", *arguments]) == 0
    load(f"file://{tmp_path}/new", quantization="int4")


def test_quality_is_measured_against_the_model_it_was_made_from(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    given, made = folders
    (tmp_path / "text.txt").write_text(word_text(300, seed=2))
    arguments = ["--model", f"file://{made}", "--text", str(tmp_path / "text.txt")]
    arguments += ["--windows", "2", "--window", "128", "--threads", "1"]
    divergences = []
    for reference in ([], ["--reference", f"file://{given}"]):
        file = tmp_path / f"{len(reference)}.json"
        assert run(cli, ["bench", "quality", *arguments, *reference, "--json", str(file)]) == 0
        figures = {row["form"]: row for row in json.loads(file.read_text())["figures"]}
        assert figures["float32"]["divergence"]["median"] == 0
        divergences.append(figures["int4"]["divergence"]["median"])
    # int4 keeps the weights: beside itself only the output layer's int8 is lost.
    assert divergences[0] < 0.3 * divergences[1]


def test_of_a_gguf_file_the_description_is_written(tmp_path: Path) -> None:
    """The bundled model: what its new folder says of it is what the file says."""
    url = f"file://{bundled_folder()}/SmolLM2-135M-Instruct.Q4_1.gguf"
    source = open_source(url)
    write_description(tmp_path, url, source)
    written = json.loads((tmp_path / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.num_hidden_layers) == ("llama", 30)
    assert frozenset(written["eos_token_id"]) == source.eos_token_ids
    for name, content in source.tokenizer_files.items():
        assert (tmp_path / name).read_bytes() == content
