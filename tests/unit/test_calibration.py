"""Calibrated int4: what it keeps, how far it is from the exact model, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from helpers.models import TINY, bundled_folder, load
from helpers.word_models import save_worded, word_ids, word_text
from kvasir.bench.quality_command import _text as text_of_bench_quality
from kvasir.cli.commands import cli
from kvasir.cli.errors import run
from kvasir.worker.calibration.gptq import round_matrix, settled
from kvasir.worker.calibration.layers import Calibration, Streams
from kvasir.worker.calibration.quantize import Sample, quantize
from kvasir.worker.calibration.text import standard_docstrings
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.quantization import quantize_int4
from kvasir.worker.model.source import open_source

SAMPLE = Sample(word_text(6000, seed=1), windows=64, window=64, seed=0)


def quiet(_: str) -> None:
    pass


def correlated(tokens: int, inputs: int, seed: int) -> Tensor:
    """Rows as layers see them: features depend on each other, and few of them are large."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=random) * 0.3 + torch.eye(inputs)
    sizes = torch.rand(inputs, generator=random) ** 3 + 0.05
    return torch.randn(tokens, inputs, generator=random) @ mixing * sizes


@settings(deadline=None, max_examples=40)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 130),
    scale=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]),
    offset=st.sampled_from([0.0, 0.5, 300.0]),
    seed=st.integers(0, 2**31),
)
def test_int4_keeps_what_was_rounded_bit_for_bit(
    outputs: int, inputs: int, scale: float, offset: float, seed: int
) -> None:
    """Also groups of tiny values, of almost equal ones, and of outliers among them."""
    torch.manual_seed(seed)
    weight = (torch.randn(outputs, inputs) ** 3 + offset) * scale
    rows = correlated(200, inputs, seed)
    found = round_matrix(weight, rows, torch.zeros(200, outputs))
    assert torch.equal(quantize_int4(found).dequantized(), found)
    assert torch.equal(settled(found), found)


def test_errors_are_made_up_for() -> None:
    """On rows that were not seen, products are closer than those of plain rounding."""
    torch.manual_seed(5)
    weight = torch.randn(64, 96)
    rows = correlated(3000, 96, 5)
    seen, unseen = rows[:2000], rows[2000:]
    found = round_matrix(weight, seen, torch.zeros(2000, 64))
    plain = quantize_int4(weight).dequantized()
    errors = [((unseen @ (w - weight).T).norm()) for w in (found, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_inputs_that_are_disturbed_are_made_up_for() -> None:
    """What is wanted are the products with the exact inputs; half of the way there is taken."""
    torch.manual_seed(6)
    weight = torch.randn(64, 96)
    exact = correlated(3000, 96, 6)
    disturbed = exact + 0.3 * exact.roll(1, 1)
    wanted = exact @ weight.T
    seen = slice(0, 2000)
    missing = (wanted - disturbed @ weight.T)[seen]
    found = round_matrix(weight, disturbed[seen], missing)
    without = round_matrix(weight, disturbed[seen], torch.zeros_like(missing))
    errors = [(disturbed[2000:] @ w.T - wanted[2000:]).norm() for w in (found, without)]
    assert errors[0] < 0.7 * errors[1]


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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what `kvasir quantize` makes of it."""
    root = tmp_path_factory.mktemp("calibrated")
    save_worded("llama", root / "given")
    (root / "given" / "chat_template.jinja").write_text("{{ messages[0].content }}")
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
    before, after = (json.loads((f / "config.json").read_text()) for f in folders)
    assert after["dtype"] == "float32"
    assert {**before, "dtype": "float32"} == after
    assert not [entry for entry in made.parent.iterdir() if entry.name.startswith(".")]
    weights = [file for file in made.iterdir() if file.suffix == ".safetensors"]
    assert {file.stat().st_mode & 0o777 for file in weights} == {0o644}
    assert sum(len(load_file(file)) for file in weights) == len(
        open_source(f"file://{made}").weights.shapes()
    )


def test_standard_text_is_no_part_of_what_quality_is_measured_on() -> None:
    measured = text_of_bench_quality(None)
    docstrings = standard_docstrings().split("\n\n")
    assert sum(map(len, docstrings)) > 200_000
    paragraphs = [" ".join(part.split()) for part in docstrings if len(part) > 200]
    flat = " ".join(measured.split())
    assert not [part for part in paragraphs if part in flat]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "{root}/none", "--output", "{root}/new"], "/none does not exist"),
        (["--model", "{root}", "--output", "{root}/new"], "has no config.json"),
        (["--model", "hf://some/model", "--output", "{root}/new"], "is not a model URL"),
        (["--model", "{given}", "--output", "{made}"], "made exists; remove it"),
        (["--model", "{given}", "--output", "{root}/a/b/c"], "cannot be made"),
        (
            ["--model", "{given}", "--output", "{root}/new", "--text", "{root}/short.txt"],
            "text: its 30 tokens are fewer than 32 windows of 512; give a longer text",
        ),
        (
            ["--model", "{given}", "--output", "{root}/new", "--text", "{root}/latin.txt"],
            "is not UTF-8",
        ),
        (
            ["--model", "{given}", "--output", "{root}/new", "--window", "4096"],
            "window: 4096 is beyond the model's 2048 tokens",
        ),
    ],
)
def test_what_is_refused(
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    given, made = folders
    root = given.parent
    (root / "short.txt").write_text(word_text(30, seed=9))
    (root / "latin.txt").write_bytes("é".encode("latin-1"))
    before = sorted(root.iterdir())
    filled = [argument.format(root=root, given=given, made=made) for argument in arguments]
    assert run(cli, ["quantize", *filled]) == 2
    assert said in capsys.readouterr().err
    assert sorted(root.iterdir()) == before


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
    from kvasir.worker.calibration.checkpoint import write_description

    url = f"file://{bundled_folder()}/SmolLM2-135M-Instruct.Q4_1.gguf"
    source = open_source(url)
    write_description(tmp_path, url, source)
    written = json.loads((tmp_path / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.num_hidden_layers) == ("llama", 30)
    assert frozenset(written["eos_token_id"]) == source.eos_token_ids
    for name, content in source.tokenizer_files.items():
        assert (tmp_path / name).read_bytes() == content


def test_what_config_json_cannot_say_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from kvasir.worker.calibration.checkpoint import write_description

    url = f"file://{bundled_folder()}/SmolLM2-135M-Instruct.Q4_1.gguf"
    source = open_source(url)
    odd = replace(source, config=replace(source.config, rope_divisors=(1.0,) * 32))
    with pytest.raises(ModelError, match=r"config\.json cannot say its rope_divisors"):
        write_description(tmp_path, url, odd)
