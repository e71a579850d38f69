"""A worker without a model: a real gRPC server that speaks Engine, with scripted behavior.

Its tokens are a function of every token before them and the seed, so a replay that loses,
repeats or reorders a token gives a visibly different continuation. ``expected_tokens`` is
the answer that an undisturbed run gives.

    worker = FakeWorker("w0")
    await worker.start()
    worker.address, worker.submits, worker.aborts ...
    await worker.kill()       # streams break at once, as in a crash
    await worker.start()      # same port, new epoch, empty cache
    await worker.stop()

``python -m helpers.fake_worker --id w0`` runs one as a process and prints its address.
"""

# ruff: noqa: N802, ARG002 - names and arguments of RPC methods are gRPC's

import argparse
import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import grpc

from kvasir.proto.blocks import block_hashes, cacheable_blocks
from kvasir.proto.errors import Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import engine_pb2_grpc as rpc

BLOCK_SIZE = 16
VOCAB_SIZE = 1000

TokenFunction = Callable[[Sequence[int], Sequence[int], int], int]
"""(prompt ids, output ids so far, seed) -> next output id."""

_Context = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]


def hashed_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
    """The default token function: never below 10, so that small ids can be special."""
    text = f"{list(prompt_ids)}{list(output_ids)}{seed}".encode()
    return 10 + int.from_bytes(hashlib.sha256(text).digest()[:4], "little") % (VOCAB_SIZE - 10)


def expected_tokens(
    prompt_ids: Sequence[int], seed: int, count: int, token: TokenFunction = hashed_token
) -> list[int]:
    """The first ``count`` output tokens of an undisturbed run."""
    output: list[int] = []
    while len(output) < count:
        output.append(token(prompt_ids, output, seed))
    return output


class FinishStyle(Enum):
    """How the end of a request is told."""

    WITH_LAST_TOKEN = auto()
    """In one message with the last token, as the contract asks."""
    ALONE = auto()
    NEVER = auto()


@dataclass
class Script:
    """How a fake worker behaves; may be changed while it runs."""

    token: TokenFunction = hashed_token
    eos_token_id: int | None = None
    step_seconds: float = 0.0
    """Time of one step, which gives every live request one token."""
    first_token_gate: asyncio.Event | None = None
    """If set: no request gets its first token before this event."""
    report_seconds: float = 0.1
    """Time between load reports while idle."""
    refuse: Callable[[pb.Submit], Refusal | None] = lambda _: None
    die_after_tokens: int | None = None
    """Kill the server once it has given this many tokens in all."""
    finish: FinishStyle = FinishStyle.WITH_LAST_TOKEN
    prefill_outcome: pb.PrefillOutcome.ValueType = pb.PREFILL_OUTCOME_REMOTE
    peer_fault: bool = False
    """Reported for requests that name a prefill peer."""
    tokenizer_files: dict[str, bytes] = field(
        default_factory=lambda: {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
    )


@dataclass
class _Live:
    submit: pb.Submit
    session: "_Session"
    output: list[int]
    cached_tokens: int
    chain: list[bytes]
    started: bool = False
    """Whether the first token is out."""


class _Session:
    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()


class FakeWorker(rpc.EngineServicer):
    """One scripted worker. ``info`` may be changed before ``start``."""

    def __init__(
        self,
        worker_id: str = "w0",
        *,
        role: pb.Role.ValueType = pb.ROLE_BOTH,
        script: Script | None = None,
        cache_blocks: int = 4096,
        port: int = 0,
    ) -> None:
        self.script = script or Script()
        self.port = port
        self.cache_blocks = cache_blocks
        self.info = pb.WorkerInfo(
            worker_id=worker_id,
            role=role,
            model="fake",
            revision="1",
            layout=pb.KvLayout(model_fingerprint="fake", dtype="float32", block_size=BLOCK_SIZE),
            max_model_len=4096,
            vocab_size=VOCAB_SIZE,
            tokenizer_hash="fake-tokenizer",
            kv_blocks_total=cache_blocks,
            max_running_requests=64,
        )
        self.submits: list[pb.Submit] = []
        self.aborts: list[str] = []
        self.snapshot_requests = 0
        self.tokenizer_requests = 0
        self.tokens_given = 0
        self.live: dict[str, _Live] = {}
        self.cache: dict[bytes, None] = {}
        self.sequence = 0
        self.frozen = False
        self._sessions: set[_Session] = set()
        self._query_tokens = 0
        self._hit_tokens = 0
        self._work = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        """Serve, with a new epoch and an empty cache; again on the same port after a kill."""
        self.info.epoch = str(uuid.uuid4())
        self.live.clear()
        self.cache.clear()
        self.sequence = 0
        self._server = grpc.aio.server()
        rpc.add_EngineServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        self._tasks = [asyncio.create_task(self._steps()), asyncio.create_task(self._reports())]

    async def kill(self) -> None:
        """Break every stream at once. ``running`` is false when all is down."""
        if self._server is None:
            return
        await self._server.stop(None)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.live.clear()
        self._server = None

    stop = kill

    # --- scripted cache events -------------------------------------------------------------

    def store(self, chain: Sequence[bytes]) -> None:
        """Blocks enter the cache, least recently stored ones leave if it is full."""
        new = [block for block in chain if block not in self.cache]
        if not new:
            return
        self.cache.update(dict.fromkeys(new))
        self._emit(pb.KvEvent(stored=pb.BlocksStored(block_hashes=new)))
        surplus = list(self.cache)[: max(len(self.cache) - self.cache_blocks, 0)]
        if surplus:
            self.remove(surplus)

    def remove(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.cache.pop(block, None)
        self._emit(pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=blocks)))

    def clear(self) -> None:
        self.cache.clear()
        self._emit(pb.KvEvent(cleared=pb.CacheCleared()))

    def lose_event(self) -> None:
        """Count an event that no router gets to see."""
        self.sequence += 1

    def _emit(self, event: pb.KvEvent) -> None:
        self.sequence += 1
        batch = pb.KvEventBatch(first_sequence=self.sequence, events=[event])
        self._broadcast(pb.WorkerMessage(kv_events=batch))

    # --- reports ---------------------------------------------------------------------------

    def load(self) -> pb.LoadReport:
        queued = sum(
            len(r.submit.prompt_token_ids) - r.cached_tokens
            for r in self.live.values()
            if not r.started
        )
        active = sum(len(r.submit.prompt_token_ids) + len(r.output) for r in self.live.values())
        return pb.LoadReport(
            running=len(self.live),
            queued_prefill_tokens=queued,
            active_kv_tokens=active,
            kv_blocks_total=self.cache_blocks,
            kv_blocks_used=-(-active // BLOCK_SIZE),
            kv_blocks_cached=len(self.cache),
            draining=self.info.draining,
            role=self.info.role,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
        )

    def report(self) -> None:
        """Send a load report now."""
        self._broadcast(pb.WorkerMessage(load=self.load()))

    def _broadcast(self, message: pb.WorkerMessage) -> None:
        for session in self._sessions:
            self._send(session, message)

    def _send(self, session: _Session, message: pb.WorkerMessage) -> None:
        if not self.frozen:
            session.outgoing.put_nowait(message)

    async def _reports(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(self.script.report_seconds)

    # --- the engine ------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self.script.step_seconds)
            self._step()
            if not self.live:
                self._work.clear()
            dying = self.script.die_after_tokens
            if dying is not None and self.tokens_given >= dying:
                self.script.die_after_tokens = None
                await asyncio.sleep(0.02)  # lets what was sent reach the wire
                await self.kill()
                return

    def _step(self) -> None:
        gate = self.script.first_token_gate
        batches: dict[_Session, list[pb.SequenceOutput]] = {}
        for live in list(self.live.values()):
            if gate is not None and not gate.is_set() and not live.started:
                continue
            batches.setdefault(live.session, []).extend(self._advance(live))
        for session, outputs in batches.items():
            self._send(session, pb.WorkerMessage(step=pb.StepBatch(outputs=outputs)))
        if batches:
            self.report()

    def _advance(self, live: _Live) -> list[pb.SequenceOutput]:
        """One token of one request, and its finish if that was the last one."""
        submit, sampling = live.submit, live.submit.sampling
        output = pb.SequenceOutput(request_id=submit.request_id)
        if len(live.output) >= sampling.max_tokens:  # a replay of a complete request
            del self.live[submit.request_id]
            output.finish_reason = pb.FINISH_REASON_LENGTH
            return [output]
        if not live.started:
            live.started = True
            output.prefill.CopyFrom(self._prefill_report(live))
            if sampling.prompt_logprobs >= 0:
                output.prompt_logprobs.append(pb.TokenLogprobs())
                output.prompt_logprobs.extend(
                    _logprobs(token, sampling.prompt_logprobs)
                    for token in submit.prompt_token_ids[1:]
                )
            self.store(live.chain)
        token = self.script.token(submit.prompt_token_ids, live.output, sampling.seed)
        live.output.append(token)
        self.tokens_given += 1
        output.token_ids.append(token)
        if sampling.logprobs >= 0:
            output.logprobs.append(_logprobs(token, sampling.logprobs))
        finish = self._finish(token, live)
        if finish == pb.FINISH_REASON_UNSPECIFIED:
            return [output]
        del self.live[submit.request_id]
        match self.script.finish:
            case FinishStyle.WITH_LAST_TOKEN:
                output.finish_reason = finish
                return [output]
            case FinishStyle.ALONE:
                end = pb.SequenceOutput(request_id=submit.request_id, finish_reason=finish)
                return [output, end]
            case FinishStyle.NEVER:
                return [output]

    def _finish(self, token: int, live: _Live) -> pb.FinishReason.ValueType:
        sampling = live.submit.sampling
        ends = token == self.script.eos_token_id and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids:
            return pb.FINISH_REASON_STOP
        if len(live.output) >= sampling.max_tokens:
            return pb.FINISH_REASON_LENGTH
        return pb.FINISH_REASON_UNSPECIFIED

    def _prefill_report(self, live: _Live) -> pb.PrefillReport:
        if not live.submit.HasField("prefill"):
            return pb.PrefillReport(
                cached_tokens=live.cached_tokens, outcome=pb.PREFILL_OUTCOME_LOCAL
            )
        return pb.PrefillReport(
            cached_tokens=live.cached_tokens,
            outcome=self.script.prefill_outcome,
            prefill_worker_id=live.submit.prefill.worker_id,
            peer_fault=self.script.peer_fault,
        )

    def _submit(self, submit: pb.Submit, session: _Session) -> None:
        self.submits.append(submit)
        refusal = self.script.refuse(submit)
        if refusal is not None:
            output = pb.SequenceOutput(
                request_id=submit.request_id,
                finish_reason=pb.FINISH_REASON_REFUSED,
                refusal=refusal.to_proto(),
            )
            self._send(session, pb.WorkerMessage(step=pb.StepBatch(outputs=[output])))
            return
        tokens = [*submit.prompt_token_ids, *submit.output_token_ids]
        chain = block_hashes(tokens, BLOCK_SIZE, submit.cache_salt)
        hits = 0
        for block in chain[: cacheable_blocks(len(tokens), BLOCK_SIZE)]:
            if block not in self.cache:
                break
            hits += 1
        self._query_tokens += len(tokens)
        self._hit_tokens += hits * BLOCK_SIZE
        self.live[submit.request_id] = _Live(
            submit, session, list(submit.output_token_ids), hits * BLOCK_SIZE, chain
        )
        self._work.set()

    # --- Engine ----------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: _Context
    ) -> AsyncIterator[pb.WorkerMessage]:
        session = _Session()
        hello = await anext(request_iterator)
        if not hello.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield pb.WorkerMessage(opened=pb.Opened(info=self.info))
            self._sessions.add(session)
            while True:
                yield await session.outgoing.get()
        finally:
            self._sessions.discard(session)
            reader.cancel()
            for request_id in [k for k, r in self.live.items() if r.session is session]:
                del self.live[request_id]

    async def _read(self, session: _Session, messages: AsyncIterator[pb.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    self._submit(message.submit, session)
                case "abort":
                    self.aborts.append(message.abort.request_id)
                    self.live.pop(message.abort.request_id, None)
                case "snapshot_request":
                    self.snapshot_requests += 1
                    self._send_snapshot(session)

    def _send_snapshot(self, session: _Session) -> None:
        """In two parts, so that readers must put them together."""
        blocks = list(self.cache)
        half = len(blocks) // 2
        for part, last in ((blocks[:half], False), (blocks[half:], True)):
            snapshot = pb.KvSnapshot(sequence=self.sequence, block_hashes=part, last=last)
            self._send(session, pb.WorkerMessage(kv_snapshot=snapshot))

    async def GetInfo(self, request: pb.GetInfoRequest, context: object) -> pb.WorkerInfo:
        return self.info

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> AsyncIterator[pb.TokenizerChunk]:
        self.tokenizer_requests += 1
        for name, data in self.script.tokenizer_files.items():
            for start in range(0, len(data), 1 << 20):
                yield pb.TokenizerChunk(name=name, data=data[start : start + (1 << 20)])

    def _status(self) -> pb.DrainStatus:
        return pb.DrainStatus(draining=self.info.draining, running=len(self.live))

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainStatus:
        self.info.draining = True
        self.report()
        return self._status()

    async def Undrain(self, request: pb.UndrainRequest, context: object) -> pb.DrainStatus:
        self.info.draining = False
        self.report()
        return self._status()

    async def SetRole(self, request: pb.SetRoleRequest, context: object) -> pb.WorkerInfo:
        self.info.role = request.role
        self.report()
        return self.info


def _logprobs(token: int, top: int) -> pb.TokenLogprobs:
    """Made-up logprobs that depend on the token alone."""
    ids = [(token + i) % VOCAB_SIZE for i in range(top)]
    return pb.TokenLogprobs(
        logprob=-0.5 - token / VOCAB_SIZE,
        rank=1,
        top_ids=ids,
        top_logprobs=[-0.5 - i - token / VOCAB_SIZE for i in range(top)],
    )


async def _serve(worker: FakeWorker) -> None:
    await worker.start()
    print(worker.address, flush=True)  # noqa: T201 - the parent reads the address
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run one fake worker until it is stopped.")
    parser.add_argument("--id", default="w0")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(_serve(FakeWorker(options.id, script=Script(step_seconds=options.step_seconds))))
