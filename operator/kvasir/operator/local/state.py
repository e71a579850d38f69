"""The state directory: where one local instance keeps its files, and how others find it.

    <root>/<service>/lock                 held (flock) by the running `kvasir up`
                     instance.json        pid, URL and processes of the running instance
                     workers.json         ready workers, for the router
                     <process>.config.json, <process>.state.json, <process>.log,
                     <process>.log.1       what was logged before that

Every JSON file is replaced by rename, so that no reader sees half of one. A recorded
process is signaled only if pid, start time and command line all agree.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_SAME_START = 1.0
"""Seconds. psutil derives start times from the boot time, which clock adjustments move."""


class AlreadyRunningError(Exception):
    """Another `kvasir up` holds the state directory."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Identifies a process beyond the reuse of its pid. ``started``: seconds since the epoch."""

    id: str
    pid: int
    started: float


@dataclass(frozen=True, slots=True)
class Instance:
    """A running `kvasir up`."""

    name: str
    url: str
    supervisor: ProcessRecord
    processes: tuple[ProcessRecord, ...]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a process says of itself in its state file."""

    pid: int
    phase: str
    """starting, loading, ready or draining."""
    detail: str = ""
    address: str = ""
    """host:port of its service; known from phase ready on."""
    metrics_address: str = ""
    """host:port of its metrics and health check, if that is another one."""

    @property
    def health_address(self) -> str:
        return self.metrics_address or self.address


def state_root(environment: Mapping[str, str]) -> Path:
    """$XDG_STATE_HOME/kvasir, by default ~/.local/state/kvasir (XDG base directories)."""
    base = environment.get("XDG_STATE_HOME", "")
    # The specification says that relative paths are invalid and to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return root / "kvasir"


def record_of(process_id: str, pid: int) -> ProcessRecord:
    """Raises psutil.NoSuchProcess if it is gone already."""
    return ProcessRecord(process_id, pid, psutil.Process(pid).create_time())


class StateDirectory:
    """The files of one instance. Use its writing methods only while holding the lock."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.workers_file = self.path / "workers.json"

    def config_file(self, process_id: str) -> Path:
        return self.path / f"{process_id}.config.json"

    def state_file(self, process_id: str) -> Path:
        return self.path / f"{process_id}.state.json"

    def log_file(self, process_id: str) -> Path:
        return self.path / f"{process_id}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the directory. Raises AlreadyRunningError; the kernel unlocks at process death."""
        # Configs may hold API keys: for this user alone.
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyRunningError(self.path.name) from None
            yield

    def write_json(self, path: Path, content: object) -> None:
        # Again, in case somebody tidied up: no reason to stop the service.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)

    def write_instance(self, instance: Instance) -> None:
        self.write_json(self.path / "instance.json", asdict(instance))

    def remove_instance(self) -> None:
        (self.path / "instance.json").unlink(missing_ok=True)

    def read_instance(self) -> Instance | None:
        return _instance(self.path / "instance.json")

    def read_state(self, process_id: str, pid: int) -> ProcessState | None:
        """The state that the process with this pid wrote; None while there is none."""
        content = _read_json(self.state_file(process_id))
        # An earlier process of the same id may have left its file.
        if not isinstance(content, dict) or content.get("pid") != pid:
            return None
        fields = ("phase", "detail", "address", "metrics_address")
        return ProcessState(pid, **{field: str(content.get(field, "")) for field in fields})

    def stop_leftovers(self) -> list[str]:
        """Kill what a `kvasir up` that was itself killed has left; ids of those processes."""
        instance = self.read_instance()
        if instance is None:
            return []
        leftovers = [
            (record.id, process)
            for record in instance.processes
            if (process := _alive(record)) and _mentions(process, self.path)
        ]
        for _, process in leftovers:
            # psutil compares the start time once more before it signals.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([process for _, process in leftovers], timeout=10)
        self.remove_instance()
        return [process_id for process_id, _ in leftovers]


def running_instances(root: Path) -> list[Instance]:
    """Every instance of this user that runs now."""
    found = (_instance(path) for path in sorted(root.glob("*/instance.json")))
    return [instance for instance in found if instance and _alive(instance.supervisor)]


def metrics_urls(root: Path, url: str) -> dict[str, str]:
    """Where each process of the instance at ``url`` shows its metrics, by the process's id.

    Processes that are not ready yet have no address. Empty if no such instance runs here.
    """
    found: dict[str, str] = {}
    for instance in running_instances(root):
        if instance.url != url:
            continue
        directory = StateDirectory(root, instance.name)
        for record in instance.processes:
            state = directory.read_state(record.id, record.pid)
            if state is not None and state.health_address:
                found[record.id] = f"http://{state.health_address}/metrics"
    return found


def _alive(record: ProcessRecord) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.started) < _SAME_START
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _mentions(process: psutil.Process, directory: Path) -> bool:
    """Whether its command line names a file of the directory, as all our processes' do."""
    try:
        return any(part.startswith(f"{directory}{os.sep}") for part in process.cmdline())
    except psutil.Error:
        return False


def _instance(path: Path) -> Instance | None:
    content = _read_json(path)
    try:
        return Instance(
            name=content["name"],
            url=content["url"],
            supervisor=ProcessRecord(**content["supervisor"]),
            processes=tuple(ProcessRecord(**record) for record in content["processes"]),
        )
    except (KeyError, TypeError):
        return None


def _read_json(path: Path) -> Any:
    """The file's content; None if it is absent or no JSON, as after a crash of the machine."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
