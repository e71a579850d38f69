"""Load on a ModelService from a pod beside it, through its Service; every request is recorded.

From inside, so that it needs no way into the cluster but kubectl's, and so that requests take the
way that those of other pods take.
"""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.clients import Kubectl
from cluster.processes import wait_until

_SCRIPT = Path(__file__).with_name("load_script.py")
_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """What came of one request; ``begun`` is in seconds since the Unix epoch."""

    prompt: str
    text: str
    error: str | None
    begun: float
    seconds: float = 0.0
    decode: str | None = None
    prefill: str | None = None


@dataclass(frozen=True)
class LoadClient:
    """A pod with Python and aiohttp that asks the model at ``url``."""

    kubectl: Kubectl
    namespace: str
    pod: str
    url: str
    model: str
    prompts: Sequence[str]
    max_tokens: int
    folder: Path
    """For the records."""

    def answers(self, users: int = 1) -> list[Record]:
        """One answer to each prompt, so many at a time."""
        printed = self.kubectl(*self._command(users, rounds=1))
        return [Record(**json.loads(line)) for line in printed.splitlines()]

    @contextmanager
    def load(self, users: int) -> Iterator["Load"]:
        """Load that is on within the block. After it, all requests have ended."""
        path = self.folder / "load.jsonl"
        with path.open("w") as output:
            process = self.kubectl.start(*self._command(users, rounds=None), output=output)
            load = Load(process, path)
            try:
                load.wait_for_answers(users)
                yield load
                load.end()
            finally:
                load.kill()

    def _command(self, users: int, rounds: int | None) -> list[str]:
        order = {
            "url": self.url,
            "model": self.model,
            "users": users,
            "prompts": self.prompts,
            "max_tokens": self.max_tokens,
            "rounds": rounds,
        }
        where = ("exec", "--stdin", self.pod, f"--namespace={self.namespace}", "--")
        return [*where, "python", "-c", _SCRIPT.read_text(encoding="utf-8"), json.dumps(order)]


class Load:
    """Requests that go on until `end`."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self._process = process
        self._path = path

    @property
    def records(self) -> list[Record]:
        """Of all requests that have ended."""
        whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")
        return [Record(**json.loads(line)) for line in whole.splitlines()]

    @property
    def failed(self) -> list[Record]:
        return [each for each in self.records if each.error is not None]

    def wrong(self, expected: Mapping[str, str]) -> list[tuple[Record, str]]:
        """Complete answers that are not the expected ones, with these."""
        return [
            (each, expected[each.prompt])
            for each in self.records
            if each.error is None and each.text != expected[each.prompt]
        ]

    def workers(self) -> set[str]:
        """The decode workers that were used."""
        return {each.decode for each in self.records if each.decode}

    def busiest(self, count: int) -> str:
        """The decode worker that gave the most of the last ``count`` answers."""
        ((worker, _),) = Counter(
            each.decode for each in self.records[-count:] if each.decode
        ).most_common(1)
        return worker

    def in_flight(self, worker: str, moment: float) -> list[Record]:
        """Requests that went on at that decode worker then; known once they have ended."""
        return [
            each
            for each in self.records
            if each.decode == worker and each.begun < moment < each.begun + each.seconds
        ]

    def wait_for_answers(self, count: int) -> None:
        """So many more than there are now."""
        target = len(self.records) + count

        def there() -> bool:
            assert self._process.poll() is None, f"the load ended: {self._path.read_text()[-2000:]}"
            return len(self.records) >= target

        wait_until(there, f"{count} answers", _SECONDS, lambda: str(self.records[-3:]))

    def end(self) -> None:
        """No more requests; those that are under way go on to their end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(_SECONDS) == 0, self._path.read_text()[-2000:]

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def shortened(records: Sequence[Record]) -> list[Record]:
    """For messages."""
    return [replace(each, text=each.text[:40], prompt=each.prompt[:40]) for each in records[:5]]
