"""The command line itself: help, versions, errors in one line, tracebacks only with --debug."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvasir.cli.commands import cli
from kvasir.cli.errors import InvalidInput, run

COMMANDS = ("up", "status", "chat", "bench", "doctor")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["--help"]) == 0
    output = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in output


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, [command, "--help"]) == 0
    assert "--help" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, ["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvasir 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "No such command 'frob'."),
        (["up"], "Missing option '-f'"),
        (["up", "-f", "x", "--prot", "1"], "No such option '--prot'."),
        (["up", "-f", "x", "--port", "70000"], "70000 is not in the range"),
        (["up", "-f", "absent.yaml"], "absent.yaml: no such file"),
        (["chat", "--temperature", "3"], "3.0 is not in the range"),
        (["status", "--url", "localhost:1"], "write for example http://127.0.0.1:8000"),
        (["status", "--url", "http://a:b"], "write for example http://127.0.0.1:8000"),
        (["status", "--url", "http://[::1"], "write for example http://127.0.0.1:8000"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvasir: ")
    assert message in line


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, []) == 2
    assert "Commands:" in capsys.readouterr().err


def command_that_raises(error: BaseException) -> click.Command:
    @click.group()
    @click.option("--debug", is_flag=True)
    @click.pass_context
    def group(context: click.Context, debug: bool) -> None:
        context.obj.debug = debug

    @group.command()
    def fail() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (click.ClickException("it broke; mend it"), 1, "kvasir: it broke; mend it\n"),
        (InvalidInput("a: b\nc: d"), 2, "kvasir: a: b\nkvasir: c: d\n"),
        (
            ZeroDivisionError("oh"),
            1,
            "kvasir: unexpected ZeroDivisionError: oh; `kvasir --debug` shows where\n",
        ),
    ],
)
def test_errors(
    error: Exception, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command_that_raises(error), ["fail"]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command_that_raises(ZeroDivisionError("oh")), ["--debug", "fail"]) == 1
    errors = capsys.readouterr().err
    assert "Traceback" in errors
    assert errors.endswith("kvasir: unexpected ZeroDivisionError: oh\n")


def test_interrupt() -> None:
    assert run(command_that_raises(KeyboardInterrupt()), ["fail"]) == 130


def test_an_interrupt_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    result = subprocess.run(
        [sys.executable, "-m", "kvasir.cli.main", "status"],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert (result.returncode, result.stderr) == (130, b"")


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys, kvasir.cli.main, kvasir.cli.commands, kvasir.cli.up, kvasir.cli.status,"
        " kvasir.cli.chat, kvasir.cli.doctor\n"
        "print(sorted({'torch', 'grpc', 'kvasir.worker', 'kvasir.router'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_a_missing_part_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvasir.bench.cli", None)
    assert run(cli, ["bench"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs the module kvasir.bench.cli" in line


def test_up_refuses_invalid_and_unavailable_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    manifest = tmp_path / "m.yaml"
    head = "apiVersion: kvasir.dev/v1alpha1\nkind: ModelService\nmetadata: {name: a}\n"
    manifest.write_text(head + "spec: {model: {source: 'hf://a/b', dtyp: x}, engine: {x: 1}}")
    assert run(cli, ["up", "-f", str(manifest), "--port", "0"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"kvasir: {manifest}: spec.model.dtyp: unknown field; did you mean dtype?"
    assert second.startswith(f"kvasir: {manifest}: spec.engine.x: unknown field; the fields here")

    manifest.write_text(head + "spec: {model: {source: 'hf://a/b'}}")
    assert run(cli, ["up", "-f", str(manifest), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvasir: {manifest}: spec.model.source: hf:// is not available")
