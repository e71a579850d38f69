"""gRPC channels to other workers, one per address, kept for the next transfer.

Both ends ping an otherwise silent connection, so that a peer that is frozen, or gone
without a word, breaks the stream within seconds, while one that is only busy does not.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvasir.proto.v1 import kv_transfer_pb2 as pb

SERVICE = "kvasir.v1.KvTransfer"

REFUSAL_METADATA = "kvasir-refusal"
"""Trailing metadata that names the Reason of a refused Prefill."""

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # What a server tolerates of its clients' pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)

_MAX_IDLE_CHANNELS = 64

PrefillCall = grpc.aio.UnaryStreamMultiCallable[pb.PrefillRequest, bytes]


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0


class Peers:
    """``KvTransfer.Prefill`` of other workers, by address."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._options = (
            *KEEPALIVE_OPTIONS,
            ("grpc.max_receive_message_length", max_frame_bytes),
            # A worker that restarts at the same address is found again at once.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        )
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    @asynccontextmanager
    async def prefill(self, address: str) -> AsyncIterator[PrefillCall]:
        """The call at one worker, whose frames come undecoded.

        gRPC hides a decoder's exceptions, and a frame that cannot be decoded must be
        told from a broken stream, so the receiver decodes.
        """
        entry = self._entries.get(address)
        if entry is None:
            entry = _Entry(grpc.aio.insecure_channel(address, options=self._options))
            self._entries[address] = entry
        self._entries.move_to_end(address)
        entry.users += 1
        try:
            yield entry.channel.unary_stream(
                f"/{SERVICE}/Prefill",
                request_serializer=pb.PrefillRequest.SerializeToString,
                response_deserializer=_undecoded,
            )
        finally:
            entry.users -= 1
            await self._close_surplus()

    async def close(self) -> None:
        """Close all channels; calls in progress end."""
        entries, self._entries = self._entries, OrderedDict()
        for entry in entries.values():
            await entry.channel.close()

    async def _close_surplus(self) -> None:
        idle = [address for address, entry in self._entries.items() if entry.users == 0]
        for address in idle[: max(0, len(idle) - _MAX_IDLE_CHANNELS)]:
            await self._entries.pop(address).channel.close()


def _undecoded(data: bytes) -> bytes:
    return data
