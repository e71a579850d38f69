"""A proxy before a real prefill worker that damages what it passes on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from kvasir.worker.transfer.frames import Frame, decode, encode

PREFILL = "/kvasir.v1.KvTransfer/Prefill"

Tamper = Callable[[int, Frame], Awaitable[list[Frame | bytes]]]
"""(number of the frame, frame) -> what is sent in its place."""

_RawContext = grpc.aio.ServicerContext[bytes, bytes]


class TearError(Exception):
    """Raised by a tamper to break the stream."""


@asynccontextmanager
async def faulty_holder(address: str, tamper: Tamper) -> AsyncIterator[str]:
    """Address of a proxy to the KvTransfer at ``address``."""
    channel = grpc.aio.insecure_channel(address)
    upstream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PREFILL)

    async def prefill(request: bytes, context: _RawContext) -> None:
        call = upstream(request)
        try:
            number = 0
            async for data in call:
                for changed in await tamper(number, decode(data)):
                    await context.write(encode(changed) if isinstance(changed, Frame) else changed)
                number += 1
        except TearError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "torn")
        except grpc.aio.AioRpcError as error:
            await context.abort(
                error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
            )
        finally:
            call.cancel()

    server = grpc.aio.server()
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(prefill)
    service, name = PREFILL.strip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await channel.close()


async def stall(_number: int, _frame: Frame) -> list[Frame | bytes]:
    """Send nothing, ever."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
