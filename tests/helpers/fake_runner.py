"""A Runner without a model whose answers depend on every byte of KV that they should.

Each token leaves eight bytes in its slot of its block: the token id plus one (so that zero is
an empty slot) and a CRC of everything that the block table held before it. As in a real
transformer, KV at one position thus depends on all earlier positions. A sampled token is a hash
of all the slots up to the chunk's end, of the sample's index, and of the token history that it
was given. A wrong, stale, missing or shifted block changes the answer, and so does a wrong
index. An empty slot among those that a chunk reads is an error.

Asked to draft, it guesses right two times out of three.

``expected_tokens`` computes a request's answer with no blocks and no scheduler at all.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence

from kvasir.proto.sampling import TokenLogprobs
from kvasir.worker.contracts import (
    Chunk,
    Computed,
    Request,
    Sampled,
    SampleSpec,
    StepPlan,
    StepResult,
)

SLOT_BYTES = 8
_SLOT = struct.Struct("<II")


class FakeRunner:
    """Runner of contracts/step.py over a bytearray per block.

    ``steps`` keeps the executed plans' chunk sizes by request id, for assertions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._blocks = [bytearray(block_size * SLOT_BYTES) for _ in range(num_blocks)]
        self.steps: list[dict[str, int]] = []

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def block_bytes(self) -> int:
        return self._block_size * SLOT_BYTES

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps.append({chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks})
        if len(self.steps[-1]) != len(plan.chunks):
            raise ValueError("a request has two chunks in one step")
        for copy in plan.copies:
            self._blocks[copy.target][:] = self._blocks[copy.source]
        return {chunk.request_id: self._compute(chunk) for chunk in plan.chunks}

    def read_blocks(self, block_ids: Sequence[int], filled_tokens: int) -> memoryview:
        if not 0 < filled_tokens <= len(block_ids) * self._block_size:
            raise ValueError(f"{filled_tokens} tokens do not fit in {len(block_ids)} blocks")
        copied = bytearray().join(self._blocks[block] for block in block_ids)
        filled = filled_tokens * SLOT_BYTES
        copied[filled:] = bytes(len(copied) - filled)
        return memoryview(copied)

    def write_blocks(self, block_ids: Sequence[int], payload: memoryview) -> None:
        if payload.nbytes != len(block_ids) * self.block_bytes:
            raise ValueError(f"{payload.nbytes} bytes for {len(block_ids)} blocks")
        data = bytes(payload)
        for i, block in enumerate(block_ids):
            self._blocks[block][:] = data[i * self.block_bytes : (i + 1) * self.block_bytes]

    def _compute(self, chunk: Chunk) -> Computed:
        end = chunk.start + len(chunk.token_ids)
        if not chunk.token_ids or end > len(chunk.block_table) * self._block_size:
            raise ValueError(f"chunk [{chunk.start}, {end}) does not fit its block table")
        context = self._context(chunk)
        if chunk.num_to_draft:
            chunk = chunk.with_drafts(self._guess(chunk, context))
            if len(chunk.token_ids) + chunk.start > len(chunk.block_table) * self._block_size:
                raise ValueError("drafts do not fit their block table")
        digest = zlib.crc32(context)
        digests = []
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            slot = _SLOT.pack(token_id + 1, digest)
            block, offset = divmod(position, self._block_size)
            start = offset * SLOT_BYTES
            self._blocks[chunk.block_table[block]][start : start + SLOT_BYTES] = slot
            digest = zlib.crc32(slot, digest)
            digests.append(digest)
        drawn_from = digests[len(digests) - len(chunk.samples) :]
        sampled = tuple(map(self._sample, drawn_from, chunk.samples))
        return Computed(sampled, _prompt_logprobs(chunk), chunk.draft_ids)

    def _guess(self, chunk: Chunk, context: bytes) -> tuple[int, ...]:
        digest = zlib.crc32(context)
        drafts: list[int] = []
        for token_id in chunk.token_ids:
            digest = zlib.crc32(_SLOT.pack(token_id + 1, digest), digest)
        for _ in range(chunk.num_to_draft):
            spec = chunk.samples[0].after(drafts)
            token_id = _draw(digest, spec, self._vocab_size, self._eos_token_ids)
            drafts.append((token_id + (digest % 3 == 0)) % self._vocab_size)
            digest = zlib.crc32(_SLOT.pack(drafts[-1] + 1, digest), digest)
        return tuple(drafts)

    def _sample(self, digest: int, spec: SampleSpec) -> Sampled:
        token_id = _draw(digest, spec, self._vocab_size, self._eos_token_ids)
        wanted = spec.params.logprobs
        return Sampled(token_id, None if wanted is None else fake_logprobs(token_id, wanted))

    def _context(self, chunk: Chunk) -> bytes:
        """What the block table holds before the chunk."""
        count = -(-chunk.start // self._block_size)
        joined = b"".join(self._blocks[block] for block in chunk.block_table[:count])
        context = joined[: chunk.start * SLOT_BYTES]
        if any(stored == 0 for stored, _ in _SLOT.iter_unpack(context)):
            raise ValueError(f"{chunk.request_id} reads KV that was never written")
        return context


def expected_tokens(
    request: Request,
    vocab_size: int = 1000,
    eos_token_ids: Iterable[int] = (),
    max_model_len: int = 1 << 30,
) -> list[int]:
    """The new tokens that a FakeRunner gives this request when all is right.

    They continue ``request.output_ids`` and include the stop token.
    """
    sampling = request.sampling
    eos = frozenset(eos_token_ids)
    stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos)
    outputs = list(request.output_ids)
    digest = 0
    for token_id in (*request.prompt_ids, *outputs):
        digest = zlib.crc32(_SLOT.pack(token_id + 1, digest), digest)
    limit = min(sampling.max_tokens, max_model_len - len(request.prompt_ids))
    while len(outputs) < limit:
        forbid = len(outputs) < sampling.min_tokens
        spec = SampleSpec(sampling, len(outputs), request.prompt_ids, outputs, forbid)
        token_id = _draw(digest, spec, vocab_size, eos)
        outputs.append(token_id)
        if token_id in stops and not forbid:
            break
        digest = zlib.crc32(_SLOT.pack(token_id + 1, digest), digest)
    return outputs[len(request.output_ids) :]


def fake_logprobs(token_id: int, alternatives: int) -> TokenLogprobs:
    """The logprobs that a FakeRunner reports for a token."""
    top = tuple((token_id + i, -1.0 - i) for i in range(alternatives))
    return TokenLogprobs(-1.0 - token_id, 1 + token_id, top)


def _draw(digest: int, spec: SampleSpec, vocab_size: int, eos: frozenset[int]) -> int:
    history = repr((list(spec.prompt_ids), list(spec.output_ids), spec.index)).encode()
    seed = spec.params.seed if spec.params.temperature > 0 else 0
    token_id = zlib.crc32(history + seed.to_bytes(8, "little"), digest) % vocab_size
    forbidden = eos | spec.params.stop_token_ids if spec.forbid_stop else frozenset()
    while token_id in forbidden:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _prompt_logprobs(chunk: Chunk) -> tuple[TokenLogprobs, ...]:
    """One for each position of the chunk that has a following prompt token."""
    if chunk.prompt_logprobs is None:
        return ()
    following = chunk.token_ids[1:]
    if chunk.next_token_id is not None:
        following = (*following, chunk.next_token_id)
    return tuple(fake_logprobs(token_id, chunk.prompt_logprobs) for token_id in following)
