"""Reports: strict JSON, settings as people write them, and names of runs."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from helpers.fake_runner import FakeRunner
from kvasir.bench import batching, chunking, disaggregation, prefix
from kvasir.bench.cli import bench
from kvasir.bench.machine import Machine
from kvasir.bench.report import maybe_cell, print_header, write_json
from kvasir.bench.serve import Run
from kvasir.bench.stats import Objectives, Record, Spread, spread_of_known, summarize
from kvasir.bench.trial import run_name
from kvasir.bench.workload import Lengths, random_lengths
from kvasir.worker.limits import SchedulerConfig

MACHINE = Machine("a CPU", 2, (), 8.0, (), "Linux", "3.11", {}, 0.0)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    one = Spread(math.nan, -math.inf, 1.0)
    write_json(file, {"figures": [one], "ratio": {"a": math.inf}, "path": tmp_path, "runs": (1,)})
    assert json.loads(file.read_text(), parse_constant=refuse_constant) == {
        "figures": [{"median": None, "low": None, "high": 1.0}],
        "ratio": {"a": None},
        "path": str(tmp_path),
        "runs": [1],
    }
    with pytest.raises(TypeError, match="cannot write object"):
        write_json(file, {"odd": object()})


def test_the_header_has_no_python_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "outputs": {"low": Lengths("uniform", 9, 0.1), "high": Lengths("lognormal", 9, 1.5)},
        "objectives": Objectives(2.0, None),
        "shots": None,
        "ignore_eos": True,
        "batches": (1, 32),
    }
    print_header(Console(width=200), "bench", MACHINE, settings)
    assert capsys.readouterr().out.splitlines()[-2] == (
        "outputs low: shape=uniform mean=9 spread=0.1; high: shape=lognormal mean=9 spread=1.5,"
        " objectives ttft=2.0 itl=none, shots none, ignore_eos yes, batches 1 and 32"
    )


def test_a_run_that_is_not_measured_is_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [run_name(run, 2) for run in (-1, 0, 1)] == ["warm-up", "run 1 of 2", "run 2 of 2"]
    said: list[str] = []
    runner = FakeRunner(num_blocks=2200, block_size=4)
    config = SchedulerConfig(num_blocks=2200, block_size=4, max_model_len=4000)
    for module in (batching, chunking, prefix):
        monkeypatch.setattr(module, "memory_bandwidth", lambda: 1.0)
    outputs = (("all", Lengths("fixed", 4)),)
    batches = batching.Workload(4, Lengths("fixed", 4), outputs, 2, 4, 0)
    batching.measure(runner, config, batches, 1, 5000, said.append)
    chunking.measure(runner, config, chunking.Workload((8,), 1, 2, 8, 0), 1, 5000, said.append)
    prefix.measure_cost(
        runner, config, prefix.Workload(2, 8, 2, (0.5,), 1, 0), 1, 5000, said.append
    )
    assert not [line for line in said if "run 0" in line]
    assert len([line for line in said if line.endswith("warm-up")]) == len(said) / 2


# --- where requests fail ---------------------------------------------------------------------


def failed(message: str) -> Run:
    record = Record(due=0, sent=0, end=1, failure="http 400", message=message)
    return Run(summarize([record, record]), left_out=0, memory_gb_s=(1.0, 1.0))


def test_a_layout_without_any_answer_has_no_latency() -> None:
    observed = disaggregation._Observed(failed("too long"), 0.0, {"dtype": "bfloat16"})
    figure = disaggregation._figure("two pools", [observed])
    assert (figure.ttft_p50, figure.itl_p99, figure.failed) == (None, None, 2)
    assert maybe_cell(figure.ttft_p50, 1000) == "-"
    assert maybe_cell(Spread(0.1, 0.1, 0.1), 1000) == "100"
    assert spread_of_known([None, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)


def test_why_requests_failed_is_told_and_json_stays_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes = {"with": "torch", "dtype": "float32", "quantization": "none", "threads": "1"}

    async def measure(*_: object) -> list[disaggregation.Figure]:
        observed = disaggregation._Observed(failed("the prompt is too long"), 0.0, computes)
        return [disaggregation._figure(name, [observed]) for name in ("one pool", "two pools")]

    monkeypatch.setattr(disaggregation, "measure", measure)
    report = tmp_path / "report.json"
    arguments = ["disaggregation", "--threads", "2", "--requests", "2", "--json", str(report)]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 1
    assert "2 x http 400, for example: the prompt is too long" in result.output
    assert "dtype float32, quantization none, threads 2 in total" in " ".join(result.output.split())
    assert "nan" not in result.output
    figures = json.loads(report.read_text(), parse_constant=refuse_constant)["figures"]
    assert [figure["ttft_p50"] for figure in figures] == [None, None]


def test_workers_have_room_for_every_request_of_a_comparison() -> None:
    inputs, outputs = Lengths("lognormal", 1800, 0.5), Lengths("lognormal", 64, 0.5)
    work = disaggregation.Workload(1.0, 40, inputs, outputs, Objectives(), 3)
    longest = disaggregation.longest(work)
    drawn = random_lengths(40, inputs, outputs, seed=3)
    assert longest >= max(a + b for a, b in drawn) > 2048
