"""What a session has yet to send: bounded, so that a slow router costs only itself.

Load reports are not queued: only the latest one is of use. All else is kept in order. What
does not fit is an overflow, after which nothing more is taken: a router that misses one
message can make no sense of the next. Messages that are made as they are taken count nothing.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from kvasir.proto.v1 import engine_pb2 as pb


class Outbound:
    """Messages of one session, put by the loop and taken by one sender."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queue: deque[tuple[pb.WorkerMessage, int] | Iterator[pb.WorkerMessage]] = deque()
        self._bytes = 0
        self._load: pb.WorkerMessage | None = None
        self._news = asyncio.Event()
        self._taken = False
        self.overflowed = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether everything but a load report has been sent."""
        return not self._queue and not self._taken

    def put(self, message: pb.WorkerMessage) -> None:
        if self.overflowed.is_set():
            return
        size = message.ByteSize()
        if self._bytes + size > self._max_bytes:
            self._queue.clear()
            self.overflowed.set()
            return
        self._queue.append((message, size))
        self._bytes += size
        self._news.set()

    def put_parts(self, parts: Iterator[pb.WorkerMessage]) -> None:
        """One long message in parts: each is made when the one before it has been sent."""
        if not self.overflowed.is_set():
            self._queue.append(parts)
            self._news.set()

    def put_load(self, message: pb.WorkerMessage) -> None:
        """Replaces a load report that has not been sent yet."""
        self._load = message
        self._news.set()

    async def take(self) -> pb.WorkerMessage:
        """The next message. Taking one says that the one before it has been sent."""
        self._taken = False
        while True:
            message = self._next()
            if message is not None:
                self._taken = True
                return message
            if self._load is not None:
                message, self._load = self._load, None
                return message
            self._news.clear()
            await self._news.wait()

    def _next(self) -> pb.WorkerMessage | None:
        while self._queue:
            head = self._queue[0]
            if isinstance(head, tuple):
                self._queue.popleft()
                message, size = head
                self._bytes -= size
                return message
            part = next(head, None)
            if part is not None:
                return part
            self._queue.popleft()
        return None
