"""Entry point of the `kvasir` command.

Imports nothing at the top: Ctrl-C must end the command without a traceback from the first
moment on, and imports take most of its start.
"""


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from kvasir.cli.commands import cli
        from kvasir.cli.errors import run

        return run(cli)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
