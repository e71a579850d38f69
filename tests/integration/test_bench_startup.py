"""`kvasir bench startup`: what is added up, and one start of a tiny model."""

import asyncio
import subprocess
import time
from pathlib import Path

from click.testing import CliRunner
from tokenizers import Tokenizer, decoders

from helpers.models import save_tiny
from kvasir.bench.cli import bench
from kvasir.bench.startup import Start, born, measure, summarize
from kvasir.bench.stats import Spread
from kvasir.worker.config import WorkerConfig


def test_what_is_neither_weights_nor_kv_is_the_rest() -> None:
    figure = summarize([Start(3.0, 100, 500, 900, 950, {}), Start(5.0, 100, 500, 1000, 1100, {})])
    assert figure.ready_s == Spread(4.0, 3.0, 5.0)
    assert figure.other == Spread(350, 300, 400)
    assert figure.other_serving == Spread(425, 350, 500)


def test_a_process_is_born_when_it_was_started() -> None:
    tick = 0.02
    before = time.time()
    with subprocess.Popen(("sleep", "60")) as process:
        after = time.time()
        found = born(process.pid)
        process.kill()
    assert before - tick < found < after + tick


def test_a_model_that_is_not_there_is_told_as_the_worker_tells_it(tmp_path: Path) -> None:
    missing = tmp_path / "model.gguf"
    result = CliRunner().invoke(bench, ["startup", "--model", missing.as_uri(), "--threads", "1"])
    assert result.exit_code == 2
    said = [line for line in result.output.splitlines() if "Invalid value" in line]
    assert said == [f"Error: Invalid value for --model: {missing} does not exist; correct the path"]


def test_one_start(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    worker = WorkerConfig(
        worker_id="w",
        model=f"file://{tmp_path}",
        dtype="float32",
        threads=1,
        max_model_len=128,
        max_batched_tokens=64,
        kv_cache_memory=16 * 1024**2,
    )
    (start,) = asyncio.run(measure(worker, 1, 0, lambda _: None))
    assert start.ready_s > 0
    assert (start.computes["dtype"], start.computes["threads"]) == ("float32", "1")
    parameters = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) // 4
    assert 0.5 < start.weights / (4 * parameters) < 1.1
    assert 0.9 < start.kv / worker.kv_cache_memory <= 1
    for resident in (start.resident, start.serving):
        assert start.weights + start.kv < resident < start.weights + start.kv + 600e6
