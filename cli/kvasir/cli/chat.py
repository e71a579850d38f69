"""`kvasir chat`: a conversation with the served model, streamed."""

import contextlib
import sys
import unicodedata
from collections.abc import Generator, Mapping
from typing import Any

import click

from kvasir.cli.client import RouterClient, find_url, url_option

_TEMPERATURE = 0.2
"""Low, because the bundled model is small and loses the thread at the API's default of 1."""

_SILENCE = 600.0
"""Seconds to wait for the next token: a long queue or a restarting worker takes its time."""


@click.command()
@click.argument("prompt", required=False)
@url_option
@click.option("--model", metavar="NAME", help="Served model. Default: the first one listed.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=_TEMPERATURE,
    show_default=True,
    help="0: greedy.",
)
def chat(
    prompt: str | None,
    url: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
) -> None:
    """Ask PROMPT, or converse when none is given.

    Ctrl-C stops an answer, Ctrl-D leaves.
    """
    client = RouterClient(find_url(url), timeout=_SILENCE)
    options = {
        "model": model or _first_model(client),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
    }
    conversation = Conversation(client, options, system)
    if prompt is not None:
        conversation.ask(prompt)
    else:
        _converse(conversation)


class Conversation:
    """The turns so far. A turn that failed is forgotten; a stopped answer is kept."""

    def __init__(
        self, client: RouterClient, options: Mapping[str, Any], system: str | None
    ) -> None:
        self._client = client
        self._options = options
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> None:
        """Print the answer while it comes. KeyboardInterrupt passes, with the turn kept."""
        messages = [*self._messages, {"role": "user", "content": text}]
        parts: list[str] = []
        try:
            with contextlib.closing(self._answer(messages)) as answer:
                for part in answer:
                    parts.append(part)
                    click.echo(_printable(part), nl=False)
                    sys.stdout.flush()
        finally:
            if parts:
                click.echo()
                self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def _answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        body = {**self._options, "messages": messages}
        with contextlib.closing(self._client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""


def _converse(conversation: Conversation) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            # Gives input() line editing and history; not every Python has it.
            import readline  # noqa: F401
        click.echo("Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            text = input("> " if interactive else "")
        except EOFError:
            if interactive:
                click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)")
            continue
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


def _first_model(client: RouterClient) -> str:
    models = client.get("/v1/models")["data"]
    if not models:
        raise click.ClickException(f"{client.url} serves no model yet; try again in a moment")
    return str(models[0]["id"])


def _printable(text: str) -> str:
    """Without control characters: a model's output must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
