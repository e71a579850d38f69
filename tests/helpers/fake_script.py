"""How a fake worker behaves, and what it answers.

Its tokens are a function of every token before them and the seed, so a replay that loses,
repeats or reorders a token gives a visibly different continuation. ``expected_tokens`` is
the answer that an undisturbed run gives.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvasir.proto.errors import Refusal
from kvasir.proto.v1 import engine_pb2 as pb

BLOCK_SIZE = 16
VOCAB_SIZE = 1000

TokenFunction = Callable[[Sequence[int], Sequence[int], int], int]
"""(prompt ids, output ids so far, seed) -> next output id."""


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

    def end_after(
        self, token: int, count: int, sampling: pb.SamplingParams
    ) -> pb.FinishReason.ValueType:
        """Why a request ends with this ``count``-th token; UNSPECIFIED if it goes on."""
        ends = token == self.eos_token_id and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids:
            return pb.FINISH_REASON_STOP
        if count >= sampling.max_tokens:
            return pb.FINISH_REASON_LENGTH
        return pb.FINISH_REASON_UNSPECIFIED

    def prefill_report(self, submit: pb.Submit, cached_tokens: int) -> pb.PrefillReport:
        if not submit.HasField("prefill"):
            return pb.PrefillReport(cached_tokens=cached_tokens, outcome=pb.PREFILL_OUTCOME_LOCAL)
        return pb.PrefillReport(
            cached_tokens=cached_tokens,
            outcome=self.prefill_outcome,
            prefill_worker_id=submit.prefill.worker_id,
            peer_fault=self.peer_fault,
        )

    def ending(
        self, output: pb.SequenceOutput, finish: pb.FinishReason.ValueType
    ) -> list[pb.SequenceOutput]:
        """The last output of a request, and how its end is told."""
        match self.finish:
            case FinishStyle.WITH_LAST_TOKEN:
                output.finish_reason = finish
                return [output]
            case FinishStyle.ALONE:
                end = pb.SequenceOutput(request_id=output.request_id, finish_reason=finish)
                return [output, end]
            case FinishStyle.NEVER:
                return [output]


def made_up_logprobs(token: int, top: int) -> pb.TokenLogprobs:
    """Made-up logprobs that depend on the token alone."""
    ids = [(token + i) % VOCAB_SIZE for i in range(top)]
    return pb.TokenLogprobs(
        logprob=-0.5 - token / VOCAB_SIZE,
        rank=1,
        top_ids=ids,
        top_logprobs=[-0.5 - i - token / VOCAB_SIZE for i in range(top)],
    )
