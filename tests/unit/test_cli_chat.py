"""`kvasir chat` against a real HTTP server that streams."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from helpers.router_stub import RouterStub, chunk, running
from kvasir.cli.chat import Conversation
from kvasir.cli.client import RefusedError, RouterClient
from kvasir.cli.commands import cli
from kvasir.cli.errors import run

DONE = "data: [DONE]"
MODELS = {"/v1/models": {"data": [{"id": "smollm2"}]}}
ROLE = 'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}'
USAGE = 'data: {"choices": [], "usage": {}}'


def router(*answers: list[str], status: int = 200) -> RouterStub:
    return RouterStub(get=dict(MODELS), completions=list(answers), status=status)


def type_lines(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    answer = [ROLE, ": a comment", chunk("Paris"), chunk(", é.\x1b[2J"), USAGE, DONE]
    with running(router(answer)) as stub:
        arguments = ["--system", "Be brief.", "--max-tokens", "7", "--temperature", "0"]
        assert run(cli, ["chat", "Capital of France?", "--url", stub.url, *arguments]) == 0
    assert capsys.readouterr().out == "Paris, é.[2J\n"
    assert stub.requests == [
        {
            "model": "smollm2",
            "max_tokens": 7,
            "temperature": 0.0,
            "stream": True,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Capital of France?"},
            ],
        }
    ]


def test_api_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVASIR_API_KEY", "s3cret")
    stub = router([chunk("Paris"), DONE])
    stub.api_key = "s3cret"
    with running(stub):
        assert run(cli, ["chat", "Capital of France?", "--url", stub.url]) == 0
    assert capsys.readouterr().out == "Paris\n"


def test_several_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines(monkeypatch, "one\n\n  \ntwo")
    with running(router([chunk("1"), DONE], [chunk("2"), DONE])) as stub:
        assert run(cli, ["chat", "--url", stub.url, "--model", "other"]) == 0
    assert capsys.readouterr().out == "1\n2\n"
    assert [request["model"] for request in stub.requests] == ["other", "other"]
    assert stub.requests[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ([json.dumps({"error": {"message": "too long"}})], 400, "too long (HTTP 400)"),
        (
            [chunk("Par"), 'data: {"error": {"message": "worker lost"}}'],
            200,
            ": worker lost",
        ),
        ([chunk("Par")], 200, "ended the answer before it was complete; try again"),
    ],
)
def test_errors(
    answer: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(router(answer, status=status)) as stub:
        assert run(cli, ["chat", "hello", "--url", stub.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvasir: {stub.url}")
    assert line.endswith(message)


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def stream(_self: RouterClient, _path: str, body: Any) -> Generator[Any, None, None]:
        asked.append(body["messages"])
        yield json.loads(chunk("Once").removeprefix("data:"))
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RouterClient, "stream", stream)
    type_lines(monkeypatch, "a story\nthanks\n")
    assert run(cli, ["chat", "--url", "http://127.0.0.1:9", "--model", "m"]) == 0
    assert capsys.readouterr().out.splitlines() == ["Once", "(stopped)", "Once"]
    assert asked[1][1] == {"role": "assistant", "content": "Once"}


def test_the_window_limits_the_answer_unless_told_otherwise() -> None:
    with running(router([chunk("1"), DONE])) as stub:
        assert run(cli, ["chat", "one", "--url", stub.url]) == 0
    assert "max_tokens" not in stub.requests[0]


def test_the_oldest_turns_are_forgotten_when_the_window_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one\ntwo\nthree\nfour\n")
    stub = router(*([chunk(number), DONE] for number in "1234"))
    stub.window = 4  # the system message, one turn and a question
    with running(stub):
        assert run(cli, ["chat", "--url", stub.url, "--system", "Count."]) == 0
    output = capsys.readouterr()
    assert output.out == "1\n2\n3\n4\n"
    notice = "(the window is full: the oldest question and its answer are forgotten)"
    assert output.err.splitlines() == [notice, notice]
    served = [request["messages"] for request in stub.requests if len(request["messages"]) <= 4]
    assert [[message["content"] for message in messages] for messages in served] == [
        ["Count.", "one"],
        ["Count.", "one", "1", "two"],
        ["Count.", "two", "2", "three"],
        ["Count.", "three", "3", "four"],
    ]


def test_a_question_that_alone_is_too_long_is_an_error_and_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = router([chunk("1"), DONE], [chunk("2"), DONE], [chunk("3"), DONE])
    with running(stub):
        conversation = Conversation(RouterClient(stub.url), {}, None)
        conversation.ask("one")
        conversation.ask("two")
        stub.window = 0
        with pytest.raises(RefusedError, match="shorten the messages"):
            conversation.ask("three")
        stub.window = 1
        conversation.ask("four")
    assert len(stub.requests[-1]["messages"]) == 1
    (notice,) = capsys.readouterr().err.splitlines()
    assert notice == "(the window is full: the 2 oldest questions and their answers are forgotten)"


def test_an_empty_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["chat", " ", "--url", "http://127.0.0.1:9"]) == 2
    assert "PROMPT is empty" in capsys.readouterr().err


def test_the_url_may_be_that_of_the_openai_api() -> None:
    with running(router([chunk("1"), DONE])) as stub:
        assert run(cli, ["chat", "one", "--url", f"{stub.url}/v1/"]) == 0
    assert len(stub.requests) == 1


def test_bytes_that_are_no_text_are_replaced() -> None:
    with running(router([chunk("1"), DONE], [chunk("2"), DONE])) as stub:
        command = [sys.executable, "-m", "kvasir.cli.main", "chat", "--url", stub.url]
        environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}
        piped = subprocess.run(
            command, input=b"caf\xe9?\n", capture_output=True, env=environment, check=False
        )
        given = subprocess.run(
            [*command, b"caf\xe9?"], capture_output=True, env=environment, check=False
        )
    assert (piped.stderr, given.stderr) == (b"", b"")
    asked = [request["messages"][0]["content"] for request in stub.requests]
    assert asked == ["caf\N{REPLACEMENT CHARACTER}?"] * 2


def test_no_model_yet(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub(get={"/v1/models": {"data": []}})) as stub:
        assert run(cli, ["chat", "hello", "--url", stub.url]) == 1
    assert "serves no model yet" in capsys.readouterr().err
