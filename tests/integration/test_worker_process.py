"""Real worker processes on the bundled model: transfer, crashes, signals, bad settings."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from helpers.faulty_holder import faulty_holder
from helpers.local_worker import RouterSession, make_submit, router_session, token_ids
from helpers.worker_process import WorkerProcess, worker_process
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1.engine_pb2_grpc import EngineStub
from kvasir.worker.transfer.frames import Frame

TEXT = " ".join(
    f"On day {day} the lighthouse keeper counted {3 * day + 1} ships and wrote the number down."
    for day in range(1, 31)
)
MAX_TOKENS = 24
CHUNK = 32
TRANSFERS = "kvasir_kv_transfer_total"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[WorkerProcess]:
    with worker_process(folder, "decode", role="decode", prefix_caching=False) as worker:
        worker.wait_ready()
        yield worker


@asynccontextmanager
async def session_with(worker: WorkerProcess) -> AsyncIterator[RouterSession]:
    async with (
        grpc.aio.insecure_channel(worker.address) as channel,
        router_session(EngineStub(channel)) as session,
    ):
        yield session


@pytest.fixture(scope="module")
def prompt(decode: WorkerProcess) -> list[int]:
    async def fetch() -> bytes:
        async with grpc.aio.insecure_channel(decode.address) as channel:
            chunks = EngineStub(channel).GetTokenizer(pb.GetTokenizerRequest())
            return b"".join([c.data async for c in chunks if c.name == "tokenizer.json"])

    tokenizer = Tokenizer.from_str(asyncio.run(fetch()).decode())
    ids: list[int] = tokenizer.encode(TEXT).ids
    assert len(ids) > 500
    return ids


async def ask(
    session: RouterSession,
    request_id: str,
    prompt: list[int],
    peer: WorkerProcess | None = None,
    address: str = "",
) -> None:
    """``address``: where ``peer`` is reached, if not at its own."""
    prefill = None
    if peer is not None:
        prefill = pb.PrefillPeer(
            worker_id=peer.worker_id, address=address or peer.address, epoch=peer.state["epoch"]
        )
    await session.send(
        submit=make_submit(request_id, prompt, max_tokens=MAX_TOKENS, prefill=prefill)
    )


@pytest.fixture(scope="module")
def alone(decode: WorkerProcess, prompt: list[int]) -> list[int]:
    """The greedy tokens of one worker doing everything."""

    async def run() -> list[int]:
        async with session_with(decode) as session:
            await ask(session, "alone", prompt)
            return token_ids(await session.finished("alone"))

    tokens = asyncio.run(run())
    assert len(tokens) == MAX_TOKENS
    return tokens


def outcome_of(outputs: list[pb.SequenceOutput]) -> int:
    return next(output.prefill.outcome for output in outputs if output.HasField("prefill"))


def wait_idle(worker: WorkerProcess) -> None:
    usage = {"model_name": "smollm2"}
    worker.wait_metric("vllm:kv_cache_usage_perc", usage, lambda value: value == 0)


async def test_disaggregated_is_the_same_as_alone(
    folder: Path, decode: WorkerProcess, prompt: list[int], alone: list[int]
) -> None:
    with worker_process(folder, "prefill-0", role="prefill", max_batched_tokens=128) as prefill:
        prefill.wait_ready()
        async with session_with(decode) as session:
            await ask(session, "remote", prompt, prefill)
            outputs = await session.finished("remote")
        assert token_ids(outputs) == alone
        assert outcome_of(outputs) == pb.PREFILL_OUTCOME_REMOTE
        wait_idle(prefill)
        wait_idle(decode)
        prefill.signal(signal.SIGTERM)
        assert prefill.wait_exit() == 0


async def test_quantized_worker_answers_and_its_kv_is_not_taken_for_another(
    folder: Path, decode: WorkerProcess, prompt: list[int], alone: list[int]
) -> None:
    settings = {"quantization": "int8", "activation_quantization": "int8"}
    with worker_process(folder, "int8", role="both", **settings) as quantized:
        quantized.wait_ready()
        async with session_with(quantized) as session:
            await ask(session, "int8", prompt)
            assert len(token_ids(await session.finished("int8"))) == MAX_TOKENS
        async with session_with(decode) as session:
            await ask(session, "mixed", prompt, quantized)
            outputs = await session.finished("mixed")
        assert token_ids(outputs) == alone
        assert outcome_of(outputs) == pb.PREFILL_OUTCOME_RECOMPUTED


@pytest.mark.parametrize(
    ("number", "outcome", "settings"),
    [
        (signal.SIGKILL, "broken", {}),
        (signal.SIGSTOP, "timeout", {"transfer_stall_timeout": 2}),
    ],
)
async def test_a_prefill_worker_lost_in_mid_transfer(
    folder: Path,
    prompt: list[int],
    alone: list[int],
    number: signal.Signals,
    outcome: str,
    settings: dict[str, object],
) -> None:
    """The third frame is held back until the signal has been sent."""
    reached, signaled = asyncio.Event(), asyncio.Event()

    async def hold_at_2(number: int, frame: Frame) -> list[Frame | bytes]:
        if number == 2:
            reached.set()
            await signaled.wait()
        return [frame]

    with (
        worker_process(
            folder, f"prefill-{number.name}", role="prefill", max_batched_tokens=CHUNK
        ) as prefill,
        worker_process(folder, f"decode-{number.name}", role="decode", **settings) as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()
        async with (
            faulty_holder(prefill.address, hold_at_2) as address,
            session_with(decode) as session,
        ):
            await ask(session, "lost", prompt, prefill, address)
            await reached.wait()
            prefill.signal(number)
            signaled.set()
            outputs = await session.finished("lost")
        assert token_ids(outputs) == alone
        assert outcome_of(outputs) == pb.PREFILL_OUTCOME_RECOMPUTED
        assert decode.metric(TRANSFERS, {"outcome": outcome}) == 1
        wait_idle(decode)


async def test_sigterm_lets_a_running_request_finish(
    folder: Path, prompt: list[int], alone: list[int]
) -> None:
    with worker_process(folder, "ending") as worker:
        worker.wait_ready()
        async with session_with(worker) as session:
            await ask(session, "running", prompt)
            await session.until(lambda: "running" in session.outputs)
            worker.signal(signal.SIGTERM)
            await session.until(lambda: session.loads[-1].draining)
            await ask(session, "late", prompt)
            late = await session.finished("late")
            assert late[-1].refusal.reason == pb.REFUSAL_REASON_DRAINING
            assert token_ids(await session.finished("running")) == alone
            assert await session.call.code() is grpc.StatusCode.OK
        assert await asyncio.to_thread(worker.wait_exit) == 0
        assert worker.state["phase"] == "draining"
        assert "Traceback" not in worker.log
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, 0)


async def test_a_second_signal_ends_it_at_once(folder: Path, prompt: list[int]) -> None:
    with worker_process(folder, "hurried") as worker:
        worker.wait_ready()
        async with session_with(worker) as session:
            submit = make_submit("long", prompt, max_tokens=1000)
            await session.send(submit=submit)
            await session.until(lambda: "long" in session.outputs)
            worker.signal(signal.SIGTERM)
            await session.until(lambda: session.loads[-1].draining)
            worker.signal(signal.SIGTERM)
            assert await asyncio.to_thread(worker.wait_exit) == 143


def test_a_signal_while_loading_ends_it(folder: Path) -> None:
    with worker_process(folder, "early") as worker:
        worker.wait_phase("loading")
        worker.signal(signal.SIGTERM)
        assert worker.wait_exit() == 0
        assert "Traceback" not in worker.log


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bogus": 1}, "bogus: no such setting"),
        ({"port": -1}, "port: "),
        ({"model": "file:///no-such-folder"}, "no-such-folder"),
        ({"host": "192.0.2.1"}, "192.0.2.1"),
    ],
)
def test_bad_settings_are_one_clear_line(
    folder: Path, settings: dict[str, object], words: str
) -> None:
    with worker_process(folder, "bad", **settings) as worker:
        assert worker.wait_exit() == 2
        lines = [line for line in worker.log.splitlines() if line.startswith("kvasir-worker: ")]
        assert len(lines) == 1
        assert words in lines[0]
        assert "Traceback" not in worker.log


def test_a_missing_module_is_one_clear_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with worker_process(folder, "incomplete") as worker:
        assert worker.wait_exit() == 2
        last = worker.log.splitlines()[-1]
        assert last.startswith("kvasir-worker: No module named 'torch'; install ")
        assert "pip install 'kvasir[worker]'" in last
        assert "Traceback" not in worker.log


def test_an_occupied_port_is_refused(folder: Path, decode: WorkerProcess) -> None:
    port = int(decode.address.rpartition(":")[2])
    with worker_process(folder, "second", port=port, max_model_len=64) as worker:
        assert worker.wait_exit() == 2
        assert f"cannot listen on 127.0.0.1:{port}" in worker.log


def test_the_state_file_says_where_it_listens(decode: WorkerProcess) -> None:
    assert set(decode.state) == {"phase", "detail", "pid", "address", "metrics_address", "epoch"}
    assert decode.state["pid"] == decode.process.pid


def test_a_failed_engine_ends_the_process_loudly() -> None:
    program = "from kvasir.worker.main import on_fatal; on_fatal(ValueError('lost a block'))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 70
    assert "ValueError: lost a block" in done.stderr
