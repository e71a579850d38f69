"""What `kvasir quantize` refuses: one line that says why, and no file left behind."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.models import bundled_folder
from helpers.word_models import save_worded, word_text
from kvasir.cli.commands import cli
from kvasir.cli.errors import run
from kvasir.worker.calibration import quantize as quantize_module
from kvasir.worker.calibration.checkpoint import write_description
from kvasir.worker.calibration.footprint import calibration_footprint
from kvasir.worker.calibration.quantize import Sample, quantize
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.source import open_source

SAMPLE = Sample(word_text(600, seed=1), windows=8, window=64, seed=0)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A model of 2,048 tokens, alone in the folder that it is in."""
    folder = tmp_path / "given"
    save_worded("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


def refusal(given: Path) -> str:
    """Of quantizing what is given, after which nothing else is there."""
    with pytest.raises(ModelError) as caught:
        quantize(given.as_uri(), given.parent / "new", SAMPLE, 1, lambda _: None)
    assert list(given.parent.iterdir()) == [given]
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model", "{root}/none", "--output", "{root}/new"],
            "/none does not exist; correct the path",
        ),
        (["--model", "{root}", "--output", "{root}/new"], "has no config.json"),
        (["--model", "hf://some/model", "--output", "{root}/new"], "is not a model URL"),
        (["--model", "{given}", "--output", "{given}"], "given exists; remove it"),
        (["--model", "{given}", "--output", "{root}/a/b/c"], "cannot be made"),
        (
            ["--model", "{given}", "--output", "{root}/new", "--text", "{root}/short.txt"],
            "kvasir: --text: its 30 tokens are fewer than 32 windows of 512; give a longer text",
        ),
        (
            ["--model", "{given}", "--output", "{root}/new", "--text", "{root}/latin.txt"],
            "kvasir: --text: ",
        ),
        (
            ["--model", "{given}", "--output", "{root}/new", "--window", "4096"],
            "kvasir: --window: 4096 is beyond the model's 2048 tokens",
        ),
        (
            ["--model", "{given}", "--output", "{root}/new", "--threads", "100000"],
            "Invalid value for '--threads': 100000 is more than 1024",
        ),
    ],
)
def test_what_is_refused(
    given: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    root = given.parent
    (root / "short.txt").write_text(word_text(30, seed=9))
    (root / "latin.txt").write_bytes("é".encode("latin-1"))
    before = sorted(root.iterdir())
    filled = [argument.format(root=root, given=given) for argument in arguments]
    assert run(cli, ["quantize", *filled]) == 2
    assert said in capsys.readouterr().err
    assert sorted(root.iterdir()) == before


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        (
            "model.layers.1.self_attn.k_proj.weight",
            float("nan"),
            "holds values that are not finite",
        ),
        ("model.embed_tokens.weight", float("inf"), "holds values that are not finite"),
        ("model.layers.2.mlp.down_proj.weight", 1e30, "cannot be rounded to int4"),
    ],
)
def test_damaged_weights_are_named(given: Path, tensor: str, value: float, said: str) -> None:
    tensors = load_file(given / "model.safetensors")
    tensors[tensor][5, 7] = value
    save_file(tensors, given / "model.safetensors", metadata={"format": "pt"})
    assert refusal(given).startswith(f"model: {tensor} {said}")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(given: Path) -> None:
    tensors = load_file(given / "model.safetensors")
    config = json.loads((given / "config.json").read_text())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:8].contiguous()
    save_file(tensors, given / "model.safetensors", metadata={"format": "pt"})
    (given / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    said = refusal(given)
    assert said.startswith("tokenizer.json: token ")
    assert "is not among the model's 8 tokens; give the tokenizer that belongs" in said


def test_a_file_that_cannot_be_read_is_named(given: Path) -> None:
    (given / "notes.txt").symlink_to("/proc/self/mem")  # nothing is mapped at its start
    assert refusal(given).startswith(f"model: {given}/notes.txt cannot be read (")


def test_a_link_to_nothing_is_not_replaced(given: Path) -> None:
    output = given.parent / "new"
    output.symlink_to("nothing")
    with pytest.raises(ModelError, match="new exists; remove it"):
        quantize(given.as_uri(), output, SAMPLE, 1, lambda _: None)
    assert output.is_symlink()


def test_what_memory_cannot_hold_is_refused(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = calibration_footprint(open_source(given.as_uri()).config, 8 * 64)
    free = needed.model + needed.streams
    monkeypatch.setattr(quantize_module, "free_memory", lambda _: free - 1)
    said = refusal(given)
    assert said.startswith(f"windows: 8 of 64 tokens take {needed.streams} bytes beside")
    assert f"the {free - 1} bytes free; give fewer or shorter ones with --windows" in said
    monkeypatch.setattr(quantize_module, "free_memory", lambda _: needed.model - 1)
    assert refusal(given).startswith(f"model: rounding it takes {needed.model} bytes, more than")
    monkeypatch.setattr(quantize_module, "free_memory", lambda _: free)
    quantize(given.as_uri(), given.parent / "new", SAMPLE, 1, lambda _: None)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 100_000])
def test_what_the_disk_cannot_hold_is_refused(given: Path, size: int) -> None:
    """Neither the description fits, nor the weights; a limit stands for a full disk."""
    with largest_file(size):
        said = refusal(given)
    assert said.startswith("output: cannot be written (")
    assert said.endswith("; make room there, or give another folder")
    assert "File too large" in said


def test_what_config_json_cannot_say_is_refused(tmp_path: Path) -> None:
    url = f"file://{bundled_folder()}/SmolLM2-135M-Instruct.Q4_1.gguf"
    source = open_source(url)
    odd = replace(source, config=replace(source.config, rope_divisors=(1.0,) * 32))
    with pytest.raises(ModelError, match=r"config\.json cannot say its rope_divisors"):
        write_description(tmp_path, url, odd)
