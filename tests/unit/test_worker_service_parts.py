"""The small parts of the worker's service: outbound queue, identity, state file, policy."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.proto.process import LineFormatter, StateFile, join_host_port
from kvasir.proto.startup import StartError, read_config
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.config import WorkerConfig
from kvasir.worker.service.bridge import LoopBridge
from kvasir.worker.service.identity import WorkerIdentity, tokenizer_hash
from kvasir.worker.service.outbound import Outbound
from kvasir.worker.transfer.receiver import worth_pulling


def step(request_id: str) -> pb.WorkerMessage:
    output = pb.SequenceOutput(request_id=request_id)
    return pb.WorkerMessage(step=pb.StepBatch(outputs=[output]))


def load(running: int) -> pb.WorkerMessage:
    return pb.WorkerMessage(load=pb.LoadReport(running=running))


async def test_outbound_keeps_order_and_only_the_last_load() -> None:
    outbound = Outbound(1000)
    outbound.put_load(load(1))
    outbound.put(step("a"))
    outbound.put_load(load(2))
    outbound.put(step("b"))
    assert [await outbound.take() for _ in range(3)] == [step("a"), step("b"), load(2)]


async def test_outbound_is_idle_once_the_taken_message_is_sent() -> None:
    outbound = Outbound(1000)
    idle = [outbound.idle]
    outbound.put(step("a"))
    idle.append(outbound.idle)
    await outbound.take()
    idle.append(outbound.idle)
    taking = asyncio.create_task(outbound.take())
    await asyncio.sleep(0)
    idle.append(outbound.idle)
    assert idle == [True, False, False, True]
    outbound.put(step("b"))
    assert await taking == step("b")


async def test_outbound_overflows_and_takes_nothing_more() -> None:
    outbound = Outbound(step("a").ByteSize() * 2)
    outbound.put(step("a"))
    await outbound.take()
    outbound.put(step("b"))
    outbound.put(step("c"))
    assert not outbound.overflowed.is_set()
    outbound.put(step("d"))
    assert outbound.overflowed.is_set()
    outbound.put(step("e"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await outbound.take()


async def test_parts_are_made_as_they_are_taken() -> None:
    made: list[str] = []

    def parts() -> Iterator[pb.WorkerMessage]:
        for name in ("b", "c", "d"):
            made.append(name)
            yield step(name)

    outbound = Outbound(step("a").ByteSize() * 2)
    outbound.put(step("a"))
    outbound.put_parts(parts())
    outbound.put(step("e"))
    assert not outbound.overflowed.is_set()
    taken = []
    for due in (0, 1, 2, 3, 3):
        taken.append(await outbound.take())
        assert len(made) == due
        assert not outbound.idle
    assert taken == [step(name) for name in "abcde"]


async def test_the_bridge_keeps_the_order_of_posting() -> None:
    bridge = LoopBridge()
    seen: list[int] = []
    done = asyncio.Event()

    def post() -> None:
        for number in range(1000):
            bridge.post(seen.append, number)
        bridge.post(done.set)

    thread = threading.Thread(target=post)
    thread.start()
    await done.wait()
    thread.join()
    assert seen == list(range(1000))


def test_a_terminating_worker_drains_for_good() -> None:
    identity = WorkerIdentity(pb.WorkerInfo(epoch="e"))
    changes: list[bool] = []
    identity.on_draining = changes.append
    identity.set_draining(True)
    identity.set_draining(True)
    identity.set_draining(False)
    identity.set_draining(True, terminating=True)
    identity.set_draining(False)
    assert identity.draining
    assert changes == [True, False, True]


def test_the_tokenizer_hash_tells_files_apart() -> None:
    hashes = {
        tokenizer_hash(files)
        for files in ({}, {"a": b""}, {"a": b"b"}, {"ab": b""}, {"a": b"", "b": b""}, {"b": b"a"})
    }
    assert len(hashes) == 6
    assert tokenizer_hash({"a": b"1", "b": b"2"}) == tokenizer_hash({"b": b"2", "a": b"1"})


def test_the_state_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = StateFile(path, "epoch-1")
    assert json.loads(path.read_text())["phase"] == "starting"
    state.update("ready", address="h:1", metrics_address="h:2")
    state.update("draining", "finishing")
    written = json.loads(path.read_text())
    assert (written["phase"], written["address"], written["metrics_address"]) == (
        "draining",
        "h:1",
        "h:2",
    )
    assert written["epoch"] == "epoch-1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_state_file_without_an_epoch_names_none(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    StateFile(path).update("ready", address="h:1")
    assert json.loads(path.read_text()) == {
        "phase": "ready",
        "pid": os.getpid(),
        "detail": "",
        "address": "h:1",
    }


def test_log_lines_are_single_and_in_utc() -> None:
    record = logging.LogRecord("kvasir.worker", logging.INFO, "", 0, "a\nb key=%d", (1,), None)
    record.created, record.msecs = 1767225600.0, 0.0
    line = LineFormatter().format(record)
    assert line == "2026-01-01T00:00:00.000Z INFO kvasir.worker a\\nb key=1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"worker_id": "w", "colour": 1}', "colour: no such setting"),
        ('{"worker_id": ""}', "worker_id: "),
        ("{}", "worker_id: Field required"),
        ("nonsense", "Invalid JSON"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(StartError, match=words):
        read_config(WorkerConfig, path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        read_config(WorkerConfig, tmp_path / "none.json")


@pytest.mark.parametrize(
    ("tokens", "cached", "worth"), [(17, 0, True), (16, 0, False), (100, 96, False)]
)
def test_a_block_or_less_is_computed_here(tokens: int, cached: int, worth: bool) -> None:
    assert worth_pulling(tokens, cached, 16) is worth


def test_ipv6_hosts_are_bracketed() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert join_host_port("127.0.0.1", 5) == "127.0.0.1:5"
