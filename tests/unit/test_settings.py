"""--set KEY=VALUE: what it changes, and what it refuses."""

import json
from pathlib import Path

import pytest

from kvasir.proto.process import override_settings
from kvasir.proto.startup import StartError, read_config
from kvasir.router.config import RouterConfig
from kvasir.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a=1", 1),
        ("a=true", True),
        ('a={"b": [1]}', {"b": [1]}),
        ('a="1"', "1"),
        ("a=10.0.0.1", "10.0.0.1"),
        ("a=k=v", "k=v"),
        ("a=", ""),
        ("a=NaN", "NaN"),
    ],
)
def test_a_value_is_json_or_else_text(setting: str, value: object) -> None:
    changed = override_settings(b'{"a": 0, "b": 2}', [setting])
    assert json.loads(changed) == {"a": value, "b": 2}


def test_the_last_of_equal_keys_counts() -> None:
    assert json.loads(override_settings(b"{}", ["a=1", "a=2"])) == {"a": 2}


@pytest.mark.parametrize("document", [b"nonsense", b"[1]", b"\xff", b""])
def test_what_is_no_object_is_left_to_its_reader(document: bytes) -> None:
    assert override_settings(document, ["a=1"]) == document


def test_both_processes_validate_what_is_set(tmp_path: Path) -> None:
    worker, router = tmp_path / "worker.json", tmp_path / "router.json"
    worker.write_text('{"worker_id": "w", "port": 1}')
    router.write_text('{"workers_file": "w"}')
    config = read_config(WorkerConfig, worker, ["worker_id=pod-1", "host=10.0.0.1"])
    assert (config.worker_id, config.host, config.port) == ("pod-1", "10.0.0.1", 1)
    assert read_config(RouterConfig, router, ["port=9"]).port == 9
    with pytest.raises(StartError, match="colour: no such setting"):
        read_config(WorkerConfig, worker, ["colour=1"])
    with pytest.raises(StartError, match=r"threads: .* less than or equal to 1024"):
        read_config(WorkerConfig, worker, ["threads=100000"])
    with pytest.raises(StartError, match="port"):
        read_config(RouterConfig, router, ["port=70000"])


def test_a_setting_without_a_key_or_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(StartError, match=r"^--set 'port' is not KEY=VALUE$"):
        read_config(WorkerConfig, path, ["port"])
    with pytest.raises(StartError, match=r"^--set '=1' is not KEY=VALUE$"):
        read_config(RouterConfig, path, ["=1"])
