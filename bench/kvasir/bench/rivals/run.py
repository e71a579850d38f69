"""Runs one rival, behind the JSON lines of this package.

Run by the Python of the rival's own environment, never by Kvasir's: it imports the standard
library only, and the file that it is told.
"""

import importlib.util
import json
import os
import sys
from typing import Any, TextIO


def main() -> None:
    file, settings = sys.argv[1], json.loads(sys.argv[2])
    out = _take_stdout()
    rival = _load(file).Rival(settings)  # after stdout is taken: what it imports may print
    _say(out, {"ready": True, "version": rival.version})
    for line in sys.stdin:
        work = json.loads(line)
        _say(out, {"times": rival.generate(work["prompts"], work["max_tokens"])})


def _load(file: str) -> Any:
    """The module in a file, under a name that no engine has."""
    spec = importlib.util.spec_from_file_location("kvasir_rival", file)
    if spec is None or spec.loader is None:
        sys.exit(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _take_stdout() -> TextIO:
    """Keep stdout for messages; whatever an engine prints goes to stderr."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
