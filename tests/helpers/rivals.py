"""Installations of rivals for the engine bench, whose programs tests write."""

import sys
from pathlib import Path

from kvasir.bench.rival import Installation


def install(home: Path, script: str) -> Installation:
    """An installation whose interpreter (-P SCRIPT ENGINE SETTINGS) runs ``script`` instead."""
    python = home / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    body = home / "script.py"
    body.write_text(script)
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{body}" "$@"\n')
    python.chmod(0o755)
    return Installation(home.name, home)
