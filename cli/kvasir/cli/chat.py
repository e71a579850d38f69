"""`kvasir chat`: a conversation with the served model, streamed."""

import contextlib
import io
import itertools
import sys
import unicodedata
from collections.abc import Generator, Mapping
from typing import Any

import click

from kvasir.cli.client import RefusedError, RouterChoice, RouterClient, router_options
from kvasir.cli.errors import InvalidInput

_TEMPERATURE = 0.2
"""Low, because the bundled model is small and loses the thread at the API's default of 1."""

_SILENCE = 600.0
"""Seconds to wait for the next token: a long queue or a restarting worker takes its time."""

_WINDOW_EXCEEDED = "context_length_exceeded"

Message = dict[str, str]


@click.command()
@click.argument("prompt", required=False)
@router_options
@click.option("--model", metavar="NAME", help="Served model. Default: the first one listed.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    help="Longest answer. Default: what the conversation leaves of the model's window.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=_TEMPERATURE,
    show_default=True,
    help="0: greedy.",
)
def chat(
    prompt: str | None,
    router: RouterChoice,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
) -> None:
    """Ask PROMPT, or converse when none is given.

    Ctrl-C stops an answer, Ctrl-D leaves. A conversation that outgrows the model's window
    loses its oldest questions and answers.
    """
    if prompt is not None and not prompt.strip():
        raise InvalidInput("PROMPT is empty; write a question, or leave it out to converse")
    client = router.client(timeout=_SILENCE)
    options = {
        "model": model or _first_model(client),
        "temperature": temperature,
        "stream": True,
    }
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    conversation = Conversation(client, options, system)
    if prompt is not None:
        conversation.ask(prompt)
    else:
        _converse(conversation)


class Conversation:
    """The turns so far. A turn that brought no text is forgotten; a stopped answer is kept."""

    def __init__(
        self, client: RouterClient, options: Mapping[str, Any], system: str | None
    ) -> None:
        self._client = client
        self._options = options
        self._system = [_message("system", system)] if system else []
        self._turns: list[tuple[Message, Message]] = []
        """Question and answer, the oldest first."""

    def ask(self, text: str) -> None:
        """Print the answer while it comes. KeyboardInterrupt passes, with the turn kept.

        Turns that the window has no room for are forgotten, the oldest first.
        """
        question = _message("user", text)
        for forgotten in range(len(self._turns) + 1):
            try:
                self._ask(question, forgotten)
            except RefusedError as error:
                if error.code != _WINDOW_EXCEEDED or forgotten == len(self._turns):
                    raise
            else:
                return

    def _ask(self, question: Message, forgotten: int) -> None:
        """Ask with all turns but the oldest ``forgotten``. A refusal leaves all as it was."""
        turns = self._turns[forgotten:]
        parts: list[str] = []
        try:
            with contextlib.closing(self._answer(turns, question)) as answer:
                for part in answer:
                    if forgotten and not parts:
                        click.echo(f"(the window is full: {_forgets(forgotten)})", err=True)
                    parts.append(part)
                    click.echo(_printable(part), nl=False)
                    sys.stdout.flush()
        finally:
            if parts:
                click.echo()
                self._turns = [*turns, (question, _message("assistant", "".join(parts)))]

    def _answer(
        self, turns: list[tuple[Message, Message]], question: Message
    ) -> Generator[str, None, None]:
        messages = [*self._system, *itertools.chain.from_iterable(turns), question]
        body = {**self._options, "messages": messages}
        with contextlib.closing(self._client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text


def _message(role: str, text: str) -> Message:
    """Bytes of a command line that are no text have come as lone surrogates, which no server
    takes; they become the replacement character."""
    content = text.encode(errors="surrogateescape").decode(errors="replace")
    return {"role": role, "content": content}


def _forgets(turns: int) -> str:
    if turns == 1:
        return "the oldest question and its answer are forgotten"
    return f"the {turns} oldest questions and their answers are forgotten"


def _converse(conversation: Conversation) -> None:
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if interactive:
        with contextlib.suppress(ImportError):
            # Gives input() line editing and history; not every Python has it.
            import readline  # noqa: F401
        click.echo("Ctrl-C stops an answer, Ctrl-D leaves.")
    while (text := _read_question(interactive)) is not None:
        if not text.strip():
            continue
        try:
            conversation.ask(text)
        except KeyboardInterrupt:
            click.echo("(stopped)")
        except click.ClickException as error:
            if not interactive:
                raise
            click.echo(f"kvasir: {error.format_message()}", err=True)


def _read_question(interactive: bool) -> str | None:
    """One line of input; None at its end."""
    while True:
        try:
            return input("> " if interactive else "")
        except EOFError:
            if interactive:
                click.echo()
            return None
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)")


def _first_model(client: RouterClient) -> str:
    models = client.get("/v1/models")["data"]
    if not models:
        raise click.ClickException(f"{client.url} serves no model yet; try again in a moment")
    return str(models[0]["id"])


def _printable(text: str) -> str:
    """Without control characters: a model's output must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
