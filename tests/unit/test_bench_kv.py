"""`kvasir bench kv`: shares that can be worked out by hand, and the command on a small trace."""

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvasir.bench.cli import bench
from kvasir.bench.kv import PAGING, RESERVATION, Figure, Mode, Workload, fitting, measure
from kvasir.bench.traces import TraceRow


def figure(mode: Mode, rows: list[TraceRow], kv_tokens: int, max_model_len: int = 64) -> Figure:
    work = Workload(
        rows=rows,
        requests=len(rows),
        kv_tokens=kv_tokens,
        token_bytes=100,
        max_model_len=max_model_len,
        max_batched_tokens=1000,
        max_running=100,
        seed=0,
    )
    (found,) = measure(work, [mode], 1, lambda _: None)
    return found


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.bench.kv.memory_bandwidth", lambda: 1.0)


def test_reservation_wastes_what_the_sequence_does_not_reach() -> None:
    """One place, two requests: the second one waits while the first has 11, 12, 13 tokens, ends."""
    rows = [TraceRow(0.0, 10, 4)] * 2
    found = figure(Mode(RESERVATION, 16), rows, kv_tokens=64 + 16)
    # After each step one token more is known than is computed. The last block is of no use.
    taken = 3 * 80 + 16
    assert found.filled.median == pytest.approx((10 + 11 + 12) / taken)
    assert found.reserved.median == pytest.approx(3 / taken)
    assert found.internal.median == pytest.approx((3 * 64 - 33 - 3) / taken)
    assert found.external.median == pytest.approx(4 * 16 / taken)
    assert found.waste.median == found.internal.median + found.external.median
    assert found.table.median == pytest.approx(3 * 4 * 8 / (taken * 100))
    assert (found.running.median, found.steps.median, found.preemptions.median) == (0.75, 8, 0)


def test_paging_wastes_the_tail_of_the_last_block_alone() -> None:
    rows = [TraceRow(0.0, 10, 4)] * 4
    single = figure(Mode(PAGING, 1), rows, kv_tokens=24, max_model_len=24)
    assert single.waste.median == 0
    paged = figure(Mode(PAGING, 8), rows, kv_tokens=32, max_model_len=24)
    # Two at a time, each in two blocks of 16 slots, of which 11, 12 and 13 are known; then none.
    assert paged.running.median == 2 * 3 / 4
    assert paged.internal.median == pytest.approx((5 + 4 + 3) / (3 * 16))
    assert paged.external.median == 0


def test_a_pool_in_which_no_one_waits_is_refused() -> None:
    with pytest.raises(ValueError, match="ever waited"):
        figure(Mode(PAGING, 16), [TraceRow(0.0, 10, 4)], kv_tokens=640)


def test_rows_that_do_not_fit_are_left_out() -> None:
    rows = [TraceRow(0.0, 10, 4), TraceRow(0.0, 0, 4), TraceRow(0.0, 10, 0), TraceRow(0.0, 60, 5)]
    assert fitting(rows, 64) == rows[:1]


def test_the_command_tells_of_the_machine_and_of_every_block_size(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.json"
    lines = [f"2024-01-01 00:00:00.{i:07d},{40 + 7 * i},{5 + i}" for i in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    result = CliRunner().invoke(
        bench,
        [
            *("kv", "--trace", str(trace), "--kv-tokens", "1024", "--max-model-len", "256"),
            *("--runs", "2", "--json", str(report)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "reservation, 16" in result.output
    assert "rows left out 3" in " ".join(result.output.split())
    written = json.loads(report.read_text())
    assert written["settings"]["requests"] == 27, "as many as are measured, not as were asked for"
    assert {"cpu", "versions"} <= set(written["machine"])
    sizes = [figure["block_size"] for figure in written["figures"]]
    assert sizes == [16, 1, 2, 4, 8, 16, 32, 64, 128]
    waste = [figure["waste"]["median"] for figure in written["figures"]]
    assert waste[0] > 0.3
    assert waste[1:] == sorted(waste[1:]), "larger blocks waste more"
    for figure in written["figures"]:
        parts = ("filled", "reserved", "internal", "external")
        total = sum(figure[part]["low"] for part in parts)
        assert 0.9 < total <= 1.0001


def test_the_header_tells_of_the_rows_that_were_measured(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.json"
    rows = [f"2024-01-01 00:00:00,{10 * i},{i}" for i in range(1, 41)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    memory = ("--kv-tokens", "512", "--max-model-len", "512", "--requests", "20", "--runs", "2")
    result = CliRunner().invoke(
        bench, ["kv", "--trace", str(trace), *memory, "--json", str(report)]
    )
    assert result.exit_code == 0, result.output
    settings = json.loads(report.read_text())["settings"]
    drawn = [i for run in range(2) for i in random.Random(f"0/{run}").sample(range(1, 41), 20)]
    mean = sum(drawn) / len(drawn)
    assert settings["requests"] == 20
    assert settings["output"].startswith(f"mean={mean:.1f} ")


def refused(tmp_path: Path, lengths: str, *options: str) -> str:
    """What is said of a trace with these lengths, on one line; the exit code must be 2."""
    trace = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:00,{row}" for row in lengths.split()]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    result = CliRunner().invoke(bench, ["kv", "--trace", str(trace), *options])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_memory_for_less_than_one_sequence_is_refused(tmp_path: Path) -> None:
    told = refused(tmp_path, "40,5", "--kv-tokens", "100", "--max-model-len", "256")
    assert "--kv-tokens: 100 tokens do not hold one sequence of --max-model-len 256" in told
    assert "at least 256" in told
    told = refused(tmp_path, "40,5", "--kv-tokens", "130", "--max-model-len", "129")
    assert "at least 256" in told, "blocks of 128 tokens are the largest"


def test_a_trace_of_too_long_rows_alone_is_refused(tmp_path: Path) -> None:
    told = refused(tmp_path, "300,5 400,5 0,1", "--max-model-len", "256")
    assert "2 of 3 rows are longer than --max-model-len 256; raise it" in told


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a,b\n1,2\n")
    result = CliRunner().invoke(bench, ["kv", "--trace", str(trace)])
    assert result.exit_code == 2
    told = " ".join(result.output.split())
    assert "Invalid value for --trace: " in told
    assert "trace.csv:1: expected the columns TIMESTAMP,ContextTokens,GeneratedTokens" in told


def test_a_pool_in_which_no_one_waits_is_refused_by_the_command(tmp_path: Path) -> None:
    told = refused(tmp_path, "40,5 50,5")
    assert "--requests: none of 2 requests ever waited for memory; ask for more" in told
