"""How tokens are drawn and what is told about them: one meaning for router and worker.

These classes carry values between the two; whether a value is acceptable is for each side
to judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.proto.v1 import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are drawn; ``SamplingParams`` of engine.proto.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``min_p`` 0 and ``repetition_penalty`` 1 are off.
    ``logprobs`` None: none; 0: of the drawn token; k: also of the k most likely ones. Logprobs
    are those of the model's own logits, before penalties, bias and temperature.
    ``prompt_logprobs``: the same for each prompt token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def to_proto(self) -> pb.SamplingParams:
        return pb.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=sorted(self.stop_token_ids),
            logprobs=-1 if self.logprobs is None else self.logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
        )

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> "SamplingParams":
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty,
            logit_bias=dict(message.logit_bias),
            seed=message.seed,
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            ignore_eos=message.ignore_eos,
            stop_token_ids=frozenset(message.stop_token_ids),
            logprobs=None if message.logprobs < 0 else message.logprobs,
            prompt_logprobs=None if message.prompt_logprobs < 0 else message.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob and rank (1 is the most likely) of a token, and the most likely alternatives."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_proto(self) -> pb.TokenLogprobs:
        return pb.TokenLogprobs(
            logprob=self.logprob,
            rank=self.rank,
            top_ids=[token for token, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
        )

    @classmethod
    def from_proto(cls, message: pb.TokenLogprobs) -> "TokenLogprobs":
        """ValueError if alternatives and their logprobs differ in number."""
        top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
        return cls(message.logprob, message.rank, top)
