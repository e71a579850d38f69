"""--set KEY=VALUE: what it changes, and what it refuses."""

import json
from pathlib import Path

import pytest

from kvasir.proto.process import override_settings
from kvasir.router.main import StartError as RouterStartError
from kvasir.router.main import read_config as read_router_config
from kvasir.worker.main import StartError as WorkerStartError
from kvasir.worker.main import read_config as read_worker_config


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
    config = read_worker_config(worker, ["worker_id=pod-1", "host=10.0.0.1"])
    assert (config.worker_id, config.host, config.port) == ("pod-1", "10.0.0.1", 1)
    assert read_router_config(router, ["port=9"]).port == 9
    with pytest.raises(WorkerStartError, match="colour: no such setting"):
        read_worker_config(worker, ["colour=1"])
    with pytest.raises(RouterStartError, match="port"):
        read_router_config(router, ["port=70000"])


def test_a_setting_without_a_key_or_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(WorkerStartError, match=r"^--set 'port' is not KEY=VALUE$"):
        read_worker_config(path, ["port"])
    with pytest.raises(RouterStartError, match=r"^--set '=1' is not KEY=VALUE$"):
        read_router_config(path, ["=1"])
