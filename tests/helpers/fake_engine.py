"""The state of a fake worker, and what it sends: steps, KV events, load. No sockets.

Everything happens on one event loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.fake_script import BLOCK_SIZE, VOCAB_SIZE, Script, made_up_logprobs
from kvasir.proto.blocks import block_hashes, cacheable_blocks
from kvasir.proto.v1 import engine_pb2 as pb


@dataclass
class Live:
    """A request under way."""

    submit: pb.Submit
    session: "RouterLink"
    output: list[int]
    cached_tokens: int
    chain: list[bytes]
    started: bool = False
    """Whether the first token is out."""


class RouterLink:
    """One router, and what it is to be sent."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()


class FakeEngine:
    """Requests and a prefix cache, both of a script."""

    def __init__(
        self, worker_id: str, role: pb.Role.ValueType, script: Script, cache_blocks: int
    ) -> None:
        self.script = script
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
        self.tokens_given = 0
        self.live: dict[str, Live] = {}
        self.cache: dict[bytes, None] = {}
        self.sequence = 0
        self.frozen = False
        self.sessions: set[RouterLink] = set()
        self._query_tokens = 0
        self._hit_tokens = 0
        self.work = asyncio.Event()

    def forget(self) -> None:
        """As a process that has just begun."""
        self.live.clear()
        self.cache.clear()
        self.sequence = 0

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
        for session in self.sessions:
            self._send(session, message)

    def _send(self, session: RouterLink, message: pb.WorkerMessage) -> None:
        if not self.frozen:
            session.outgoing.put_nowait(message)

    # --- steps -----------------------------------------------------------------------------

    def step(self) -> None:
        gate = self.script.first_token_gate
        batches: dict[RouterLink, list[pb.SequenceOutput]] = {}
        for live in list(self.live.values()):
            if gate is not None and not gate.is_set() and not live.started:
                continue
            batches.setdefault(live.session, []).extend(self._advance(live))
        for session, outputs in batches.items():
            self._send(session, pb.WorkerMessage(step=pb.StepBatch(outputs=outputs)))
        if batches:
            self.report()

    def _advance(self, live: Live) -> list[pb.SequenceOutput]:
        """One token of one request, and its finish if that was the last one."""
        submit, sampling = live.submit, live.submit.sampling
        output = pb.SequenceOutput(request_id=submit.request_id)
        if len(live.output) >= sampling.max_tokens:  # a replay of a complete request
            del self.live[submit.request_id]
            output.finish_reason = pb.FINISH_REASON_LENGTH
            return [output]
        if not live.started:
            live.started = True
            output.prefill.CopyFrom(self.script.prefill_report(submit, live.cached_tokens))
            if sampling.prompt_logprobs >= 0:
                output.prompt_logprobs.append(pb.TokenLogprobs())
                output.prompt_logprobs.extend(
                    made_up_logprobs(token, sampling.prompt_logprobs)
                    for token in submit.prompt_token_ids[1:]
                )
            self.store(live.chain)
        token = self.script.token(submit.prompt_token_ids, live.output, sampling.seed)
        live.output.append(token)
        self.tokens_given += 1
        output.token_ids.append(token)
        if sampling.logprobs >= 0:
            output.logprobs.append(made_up_logprobs(token, sampling.logprobs))
        finish = self.script.end_after(token, len(live.output), sampling)
        if finish == pb.FINISH_REASON_UNSPECIFIED:
            return [output]
        del self.live[submit.request_id]
        return self.script.ending(output, finish)

    def submit(self, submit: pb.Submit, session: RouterLink) -> None:
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
        self.live[submit.request_id] = Live(
            submit, session, list(submit.output_token_ids), hits * BLOCK_SIZE, chain
        )
        self.work.set()

    def drain_status(self) -> pb.DrainStatus:
        return pb.DrainStatus(draining=self.info.draining, running=len(self.live))

    def send_snapshot(self, session: RouterLink) -> None:
        """In two parts, so that readers must put them together."""
        blocks = list(self.cache)
        half = len(blocks) // 2
        for part, last in ((blocks[:half], False), (blocks[half:], True)):
            snapshot = pb.KvSnapshot(sequence=self.sequence, block_hashes=part, last=last)
            self._send(session, pb.WorkerMessage(kv_snapshot=snapshot))
