"""The benches that load the real model, each on as little work as still has figures in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvasir.bench.cli import bench


def no_number(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The JSON report of a bench command."""
    report = tmp_path / "report.json"
    result = CliRunner().invoke(bench, [*arguments, "--json", str(report)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(report.read_text(), parse_constant=no_number)
    assert found["machine"]["cores"] >= 1
    return found


def test_batching(tmp_path: Path) -> None:
    small = ("--requests", "6", "--input-len", "8", "--output-len", "4", "--max-model-len", "64")
    report = run(tmp_path, "batching", *small, "--reserved-slots", "2")
    assert len(report["figures"]) == 8
    for figure in report["figures"]:
        assert figure["failed"] == 0
        assert figure["throughput"]["median"] > 0


def test_chunking(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    small = ("--budgets", "16,64", "--prompts", "2", "--input-len", "64", "--decoding", "2")
    report = run(tmp_path, "chunking", *small, "--png", str(picture))
    assert [figure["budget"] for figure in report["figures"]] == [16, 64]
    assert picture.stat().st_size > 1000


def test_speculation_refuses_outputs_beyond_the_model_s_length() -> None:
    """2048 tokens would fit, were there no prompt."""
    result = CliRunner().invoke(bench, ["speculation", "--output-len", "2048", "--threads", "1"])
    assert result.exit_code == 2
    told = " ".join(result.output.split())
    assert "--output-len: 2048 tokens after a prompt of" in told


def test_prefix(tmp_path: Path) -> None:
    small = ("--requests", "2", "--input-len", "64", "--output-len", "2", "--shared-requests", "1")
    report = run(tmp_path, "prefix", *small)
    rates = [gain["hit_rate"]["median"] for gain in report["gains"]]
    assert rates == [0.0, 0.25, 0.5, 0.75, 0.75], "whole blocks of 16 tokens"
    assert [gain["blocks"] for gain in report["gains"]] == [0, 1, 2, 3, 3]


@pytest.mark.timeout(300)
def test_disaggregation_moves_kv_only_between_two_pools(tmp_path: Path) -> None:
    small = ("--requests", "3", "--rate", "5", "--input-len", "48", "--output-len", "4")
    report = run(tmp_path, "disaggregation", *small, "--threads", "2")
    moved = {f["layout"]: f["transferred_bytes"]["median"] for f in report["figures"]}
    assert moved["two pools"] > 0
    assert moved["one pool, two workers"] == moved["one pool, one worker"] == 0
    assert all(figure["failed"] == 0 for figure in report["figures"])
    settings = report["settings"]
    assert settings["dtype"] in ("bfloat16", "float32"), "what auto has come to"
    assert settings["threads"] == "2 in total"


@pytest.mark.timeout(300)
def test_engine_in_this_process_and_through_the_router(tmp_path: Path) -> None:
    small = ("--forms", "full", "--rows", "run-16,cached", "--through-router")
    report = run(tmp_path, "engine", *small, "--against", "llama-cpp", "--rivals", str(tmp_path))
    whole, cached = report["figures"]
    inside, through = whole["values"].values()
    assert min(*inside, *through) > 0
    (to_inside,) = (ratios for ratios in whole["ratios"].values() if ratios)
    (ratio,) = to_inside.values()
    assert ratio["median"] == pytest.approx(through[0] / inside[0])
    assert len(cached["values"]) == 1, "through the router only whole runs are timed"
    (cost,) = report["costs_through_router"]
    assert cost["requests"] == 16
    assert min(cost["worker_s"], cost["router_s"], cost["client_s"]) > 0
    assert "not installed" in report["settings"]["llama-cpp"]
    assert all(not any(figure["failed"].values()) for figure in report["figures"])
