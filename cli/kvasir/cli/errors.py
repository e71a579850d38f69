"""How commands fail: one line on stderr with the fix; a traceback only with --debug.

A command raises click.ClickException (exit code 1) for what happened, InvalidInput (exit
code 2) for what the user gave. Anything else that reaches ``run`` is a defect of ours.
"""

import sys
import traceback
from dataclasses import dataclass

import click


class InvalidInput(click.ClickException):
    """The user's file or option is at fault."""

    exit_code = 2


@dataclass(slots=True)
class Settings:
    """Options of `kvasir` itself, before the command's name."""

    debug: bool = False


def run(command: click.Command, arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. ``arguments`` None: those of the process."""
    settings = Settings()
    try:
        result = command.main(arguments, prog_name="kvasir", standalone_mode=False, obj=settings)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _explain(error, settings)
        return error.exit_code
    except click.Abort:
        return 130
    except Exception as error:  # noqa: BLE001 - the last resort of the whole command
        _show_traceback(settings)
        hint = "" if settings.debug else "; `kvasir --debug` shows where"
        _print(f"unexpected {type(error).__name__}: {error}{hint}")
        return 1
    return result if isinstance(result, int) else 0


def _explain(error: click.ClickException, settings: Settings) -> None:
    _show_traceback(settings)
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message += f" (`{error.ctx.command_path} --help` shows what there is)"
    _print(message)


def _show_traceback(settings: Settings) -> None:
    if settings.debug:
        traceback.print_exc(file=sys.stderr)


def _print(message: str) -> None:
    for line in message.splitlines():
        click.echo(f"kvasir: {line}", err=True)
