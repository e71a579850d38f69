"""`kvasir bench serve` against a small server that behaves, and misbehaves, as it is told."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from kvasir.bench.cli import bench
from kvasir.operator.local.state import Instance, StateDirectory, record_of, state_root

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


class Server:
    """Streams ``max_tokens`` tokens for each completion, unless told to fail the nth one."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failures: dict[int, str] = {}
        self.token_pause_s = 0.0
        self.takes_token_ids = True
        self.cached_share = 0.5

    async def models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        failure = self.failures.get(len(self.bodies) - 1)
        if failure in ("404", "429", "500"):
            return web.json_response({"error": {"message": "told to"}}, status=int(failure))
        response = web.StreamResponse(headers={"x-kvasir-decode-worker": "decode-0"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        await self._stream(request, response, body, failure)
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        failure: str | None,
    ) -> None:
        async def say(event: dict[str, Any] | str) -> None:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())

        count = body["max_tokens"]
        for index in range(count):
            await asyncio.sleep(3600 if failure == "hang" else self.token_pause_s)
            await say(chunk(" tok", "length" if index == count - 1 else None))
            if failure == "error event":
                await say({"error": {"message": "the worker died"}})
                return
            if failure == "truncated":
                return
            if failure == "cut" and request.transport is not None:
                request.transport.abort()
                return
            if failure == "bad event":
                await say("{")
        await say({"choices": [], "usage": self._usage(body)})
        await say("[DONE]")

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or body["messages"][0]["content"]
        tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        return {
            "prompt_tokens": tokens if self.takes_token_ids else 99,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": int(tokens * self.cached_share)},
        }


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def run(server: Server, *arguments: str) -> Result:
    """The command, in a thread: it runs an event loop of its own."""
    async with serving(server) as url:
        return await asyncio.to_thread(
            CliRunner().invoke, bench, ["serve", "--url", url, *arguments]
        )


async def report(server: Server, tmp_path: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    path = tmp_path / "report.json"
    result = await run(server, "--json", str(path), *arguments)
    assert path.exists(), result.output
    return result, json.loads(path.read_text())


async def test_a_closed_loop_counts_what_was_really_sent_and_received(tmp_path: Path) -> None:
    server = Server()
    result, written = await report(
        server, tmp_path, "--requests", "6", "--input-len", "40", "--output-len", "5", "--runs", "2"
    )
    assert result.exit_code == 0, result.output
    assert len(written["runs"]) == 2
    for each in written["runs"]:
        summary = each["summary"]
        assert summary["succeeded"] == summary["requests"] == 6
        assert (summary["input_tokens"], summary["output_tokens"]) == (240, 30)
        assert summary["cached_tokens"] == 120
        assert summary["itl"]["count"] == 6 * 4
        assert summary["worker_share"] == {"decode-0": 1.0}
        assert each["cached_ratio"] == 0.5
        assert all(value > 0 for value in each["memory_gb_s"])
    assert written["machine"]["cores"] >= 1
    assert written["settings"]["model"] == "tiny"
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts), "no prompt is sent twice, so no run warms the next"
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)
    for title in ("TTFT ms", "output tokens/s", "served by decode-0", "memory bandwidth"):
        assert title in result.output


LOGNORMAL = ("--requests", "4", "--input-dist", "lognormal", "--concurrency", "1")


def lengths(server: Server) -> list[int]:
    return [len(body["prompt"]) for body in server.bodies]


async def test_the_same_seed_asks_for_the_same_lengths_with_new_contents(tmp_path: Path) -> None:
    first, second, other = Server(), Server(), Server()
    result, written = await report(first, tmp_path, *LOGNORMAL)
    await run(second, *LOGNORMAL)
    await run(other, *LOGNORMAL, "--seed", "1")
    assert lengths(first) == lengths(second)
    assert lengths(first) != lengths(other)
    _check, *prompts = [tuple(body["prompt"]) for body in first.bodies + second.bodies[1:]]
    assert len(set(prompts)) == len(prompts), "no command warms the cache of the next"

    shown = written["settings"]["content seed"]
    assert f"content seed {shown}" in result.output.replace("\n", "")
    again = Server()
    await run(again, *LOGNORMAL, "--content-seed", str(shown))
    assert again.bodies == first.bodies


async def test_an_unasked_warm_cache_is_a_warning(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Why?", "answer": "So."}\n' * 3)
    warning = "warning: 50 % of the input was in the server's prefix cache"
    result = await run(Server(), "--requests", "2", "--content-seed", "7")
    assert warning in result.output
    assert "leave out --content-seed" in result.output
    result = await run(Server(), "--prompts", str(questions), "--shots", "1", "--requests", "2")
    assert "warning" not in result.output
    cold = Server()
    cold.cached_share = 0.4
    result = await run(cold, "--requests", "2")
    assert "warning" not in result.output


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("429", "http 429"),
        ("500", "http 500"),
        ("error event", "error event"),
        ("truncated", "truncated"),
        ("cut", "connection lost"),
        ("bad event", "bad event"),
        ("hang", "timeout"),
    ],
)
async def test_each_failure_is_counted_by_kind_and_fails_the_command(
    tmp_path: Path, failure: str, kind: str
) -> None:
    server = Server()
    server.failures = {3: failure}  # the first is the check of the server, the second the warm-up
    result, written = await report(
        server, tmp_path, "--requests", "4", "--concurrency", "1", "--timeout", "2s"
    )
    assert result.exit_code == 1
    summary = written["runs"][0]["summary"]
    assert summary["failures"] == {kind: 1}
    assert summary["succeeded"] == 3
    assert f"1 x {kind}" in result.output


async def test_refusals_can_be_allowed() -> None:
    server = Server()
    server.failures = {2: "429"}
    arguments = ("--requests", "3", "--concurrency", "1", "--allow-refusals")
    assert (await run(server, *arguments)).exit_code == 0
    server = Server()
    server.failures = {2: "500"}
    assert (await run(server, *arguments)).exit_code == 1


async def test_an_open_loop_sends_on_time_to_a_server_that_does_not_answer(tmp_path: Path) -> None:
    server = Server()
    server.token_pause_s = 0.5
    _, written = await report(
        server, tmp_path, "--requests", "20", "--rate", "100", "--output-len", "2"
    )
    summary = written["runs"][0]["summary"]
    assert summary["succeeded"] == 20
    # One after the other would take 20 seconds.
    assert summary["duration"] < 10
    assert summary["ttft"]["p50"] >= 0.5


async def test_goodput_needs_objectives(tmp_path: Path) -> None:
    server = Server()
    server.token_pause_s = 0.05
    _, without = await report(server, tmp_path, "--requests", "2", "--output-len", "3")
    assert without["runs"][0]["summary"]["goodput_per_s"] is None
    _, missed = await report(
        server, tmp_path, "--requests", "2", "--output-len", "3", "--slo-ttft", "10ms"
    )
    assert missed["runs"][0]["summary"]["goodput_per_s"] == 0
    _, met = await report(
        server,
        tmp_path,
        "--requests",
        "2",
        "--output-len",
        "3",
        "--slo-ttft",
        "1m",
        "--slo-itl",
        "9s",
    )
    assert met["runs"][0]["summary"]["goodput_per_s"] > 0


async def test_a_trace_is_replayed_with_its_shared_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 40, "input_length": 900, "output_length": 4, "hash_ids": [0, 2]},
        {"timestamp": 80, "input_length": 90_000, "output_length": 4, "hash_ids": [0, 3]},
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    server = Server()
    result, written = await report(
        server,
        tmp_path,
        *("--trace", str(trace), "--max-total", "2000", "--speedup", "2", "--warmup", "0"),
    )
    assert result.exit_code == 0, result.output
    assert written["runs"][0]["left_out"] == 1
    _check, first, second = server.bodies
    assert (len(first["prompt"]), len(second["prompt"])) == (1000, 900)
    assert first["prompt"][:512] == second["prompt"][:512]
    assert first["prompt"][512:600] != second["prompt"][512:600]
    assert second["max_tokens"] == 4


async def test_questions_go_to_the_chat_api(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "\n".join(json.dumps({"question": f"Is {i} even?", "answer": "Maybe."}) for i in range(3))
    )
    server = Server()
    result = await run(server, "--prompts", str(questions), "--shots", "1", "--requests", "2")
    assert result.exit_code == 0, result.output
    asked = [body["messages"][0]["content"] for body in server.bodies[-2:]]
    assert all(text.startswith("Question: Is 0 even?\nAnswer: Maybe.") for text in asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api", "chat"), "use --api completions"),
        (("--shots", "2"), "--shots needs --prompts"),
        (("--slo-ttft", "500"), "write 500ms"),
        (("--requests", "0"), "x>=1"),
        (("--json", "/no-such-folder/x.json"), "no file can be written in /no-such-folder"),
    ],
)
async def test_contradictions_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = await run(Server(), *arguments)
    assert result.exit_code == 2
    assert message in result.output


async def test_a_file_is_refused_whether_or_not_a_server_runs(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Why?", "answer": "So."}\n{"question": "Why not?"}\n')
    offline = ("serve", "--url", "http://127.0.0.1:1")
    for option, file, why in (
        ("--prompts", questions, "questions.jsonl:2: answer is missing"),
        ("--trace", questions, "questions.jsonl:1: timestamp, input_length"),
    ):
        invoked = await asyncio.to_thread(CliRunner().invoke, bench, [*offline, option, str(file)])
        assert invoked.exit_code == 2
        assert f"Invalid value for {option}: " in invoked.output
        assert why in " ".join(invoked.output.split())
    questions.write_text('{"question": "Why?", "answer": "So."}\n')
    shots = ("--prompts", str(questions), "--shots", "1")
    invoked = await asyncio.to_thread(CliRunner().invoke, bench, [*offline, *shots])
    assert invoked.exit_code == 2
    assert "Invalid value for --shots: 1 worked examples leave no question of 1" in invoked.output


async def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    server = Server()
    server.failures = {0: "404"}
    result = await run(server, "--model", "another")
    assert result.exit_code == 2
    assert "Invalid value for --model: " in result.output
    assert "does not serve another, but tiny" in result.output


async def test_a_vocabulary_without_ordinary_tokens_is_refused() -> None:
    result = await run(Server(), "--vocab-size", "1000")
    assert result.exit_code == 2
    assert "Invalid value for --vocab-size: a vocabulary of 1000 tokens" in result.output


async def test_rows_that_are_all_too_long_are_the_bound_s_fault(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,100,9\n")
    result = await run(Server(), "--trace", str(trace), "--max-total", "50")
    assert result.exit_code == 2
    assert "Invalid value for --max-total: all 1 requests of " in result.output


async def test_a_server_that_is_not_there_is_one_clear_line() -> None:
    invoked = await asyncio.to_thread(
        CliRunner().invoke, bench, ["serve", "--url", "http://127.0.0.1:1"]
    )
    assert invoked.exit_code == 1
    assert invoked.output == (
        "Error: nothing answers on http://127.0.0.1:1; start one with "
        "`kvasir up -f deploy/samples/01-minimal.yaml`, or give --url\n"
    )
    invoked = await asyncio.to_thread(
        CliRunner().invoke, bench, ["serve", "--url", "http://127.0.0.1:1", "--model", "tiny"]
    )
    assert invoked.exit_code == 1
    assert "a first small request (connect): Connection refused" in invoked.output


async def test_an_address_that_is_none_is_refused() -> None:
    invoked = await asyncio.to_thread(CliRunner().invoke, bench, ["serve", "--url", "localhost:1"])
    assert invoked.exit_code == 2
    assert "'localhost:1' is no address" in invoked.output


async def test_another_server_is_told_apart() -> None:
    async with serving(Server()) as url:
        invoked = await asyncio.to_thread(
            CliRunner().invoke, bench, ["serve", "--url", f"{url}/absent"]
        )
    assert invoked.exit_code == 1
    assert "/absent/v1/models answers with HTTP 404: check --url" in invoked.output


async def test_the_instance_that_runs_here_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    invoked = await asyncio.to_thread(CliRunner().invoke, bench, ["serve"])
    assert "nothing is running; start one with" in invoked.output
    directory = StateDirectory(state_root(os.environ), "tiny")
    own = record_of("kvasir up", os.getpid())
    async with serving(Server()) as url:
        with directory.locked():
            directory.write_instance(Instance("tiny", url, own, ()))
            invoked = await asyncio.to_thread(
                CliRunner().invoke, bench, ["serve", "--requests", "1"]
            )
    assert invoked.exit_code == 0, invoked.output
    assert f"url {url}" in invoked.output


async def test_a_server_that_takes_no_token_ids_is_told_apart() -> None:
    server = Server()
    server.takes_token_ids = False
    result = await run(server)
    assert result.exit_code == 2
    assert "does not take token-id prompts" in result.output
