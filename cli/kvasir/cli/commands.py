"""The `kvasir` command group: finds the subcommand and runs it.

Subcommands are imported when they are called, so that help and errors come at once.
"""

import importlib
from importlib.metadata import version

import click

from kvasir.cli.errors import Settings

_COMMANDS = {
    "up": ("kvasir.cli.up:up", "Serve a ModelService on this machine."),
    "status": ("kvasir.cli.status:status", "Show workers, load, KV use and prefix hit rate."),
    "chat": ("kvasir.cli.chat:chat", "Talk to the served model."),
    "quantize": ("kvasir.cli.quantize:quantize", "Round a model to int4, with its quality kept."),
    "bench": ("kvasir.bench.cli:bench", "Measure a server or the engine."),
    "doctor": ("kvasir.cli.doctor:doctor", "Check this machine and say what to mend."),
}
"""Name to (module:attribute, one line of help)."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported on use."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`kvasir {cmd_name}` needs the module {error.name}, which is not installed; "
                "install kvasir[local]"
            ) from error
        assert isinstance(command, click.Command)  # noqa: S101 - invariant of the table above
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, but without importing every command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvasir"), message="kvasir %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks with errors.")
@click.pass_obj
def cli(settings: Settings, debug: bool) -> None:
    """Serve large language models with prefill and decode in separate worker pools.

    `kvasir up -f deploy/samples/01-minimal.yaml` starts; `kvasir COMMAND --help` says more.
    """
    settings.debug = debug
