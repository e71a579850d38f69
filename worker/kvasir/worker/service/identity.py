"""Who this worker is, and the two things about it that change: its role and its draining."""

import hashlib
from collections.abc import Callable, Mapping

from kvasir.proto.v1 import engine_pb2 as pb


class WorkerIdentity:
    """``WorkerInfo``, built once, with the current role and draining."""

    def __init__(self, info: pb.WorkerInfo) -> None:
        self._info = info
        self._terminating = False
        self.on_draining: Callable[[bool], None] = lambda _: None
        """Called on each change of ``draining``."""

    @property
    def epoch(self) -> str:
        return self._info.epoch

    @property
    def role(self) -> pb.Role.ValueType:
        return self._info.role

    @property
    def draining(self) -> bool:
        return self._info.draining

    def info(self) -> pb.WorkerInfo:
        copy = pb.WorkerInfo()
        copy.CopyFrom(self._info)
        return copy

    def set_role(self, role: pb.Role.ValueType) -> None:
        self._info.role = role

    def set_draining(self, draining: bool, *, terminating: bool = False) -> None:
        """A worker that terminates drains for good."""
        self._terminating = self._terminating or terminating
        draining = draining or self._terminating
        if draining != self._info.draining:
            self._info.draining = draining
            self.on_draining(draining)


def tokenizer_hash(files: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) over names and contents, sorted by name, each with its length before it."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
