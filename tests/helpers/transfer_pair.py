"""A prefill and a decode worker that exchange KV over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from helpers.fake_runner import expected_tokens
from helpers.faulty_holder import PREFILL
from helpers.local_worker import (
    VOCAB_SIZE,
    LocalWorker,
    RouterSession,
    local_worker,
    make_submit,
    router_session,
)
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.contracts import Request

PROMPT = [7 * i % VOCAB_SIZE for i in range(102)]
MAX_TOKENS = 8


def expected(prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return expected_tokens(Request("any", tuple(prompt), sampling), VOCAB_SIZE)


class Pair:
    """A decode worker, a prefill worker, and a router's session with the former."""

    def __init__(self, decode: LocalWorker, prefill: LocalWorker, session: RouterSession) -> None:
        self.decode = decode
        self.prefill = prefill
        self.session = session

    async def ask(
        self, request_id: str, prompt: list[int], peer: pb.PrefillPeer | None
    ) -> list[pb.SequenceOutput]:
        submit = make_submit(request_id, prompt, max_tokens=MAX_TOKENS, prefill=peer)
        await self.session.send(submit=submit)
        return await self.session.finished(request_id)

    async def settled(self) -> None:
        await self.decode.settled()
        await self.prefill.settled()


@asynccontextmanager
async def connected(**decode_settings: object) -> AsyncIterator[Pair]:
    async with (
        local_worker(worker_id="d", **decode_settings) as decode,  # type: ignore[arg-type]  # settings only
        local_worker(worker_id="p") as prefill,
        router_session(decode.stub) as session,
    ):
        yield Pair(decode, prefill, session)


def report(outputs: list[pb.SequenceOutput]) -> pb.PrefillReport:
    reports = [output.prefill for output in outputs if output.HasField("prefill")]
    assert len(reports) == 1
    return reports[0]


def prefill_request(worker: LocalWorker) -> kv_pb.PrefillRequest:
    """What a decode worker would ask ``worker`` for PROMPT."""
    return kv_pb.PrefillRequest(
        request_id="r",
        token_ids=PROMPT,
        sampling=make_submit("r", PROMPT).sampling,
        layout=worker.model.layout,
        expected_epoch=worker.epoch,
    )


def raw_prefill(worker: LocalWorker) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    """The call by which it is asked, with the bytes of messages."""
    return worker.channel.unary_stream(PREFILL)
