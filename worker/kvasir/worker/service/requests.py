"""Protobuf to contracts: where everything from the wire is checked.

Nothing reaches the engine that could index out of its tensors, divide by zero, or make a
sampler produce NaN. A bad value gives a ``Refusal`` that names the API field at fault.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.beam_search import num_candidates
from kvasir.worker.contracts import BeamParams, Request, Work

MAX_LOGPROBS = 20
"""Most alternatives per token, as in the OpenAI API."""
_MAX_ID_LENGTH = 256
_MAX_SALT_BYTES = 1024
_MAX_BIAS = 100.0
_MAX_PENALTY = 2.0
_LENGTH_PENALTY = (-10.0, 10.0)
_REPETITION_PENALTY = (pb.SamplingParams(repetition_penalty=0.01).repetition_penalty, 10.0)
"""The lower bound as the wire's single precision has it."""
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and its cache can take."""

    vocab_size: int
    max_model_len: int
    block_size: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Peer:
    """The prefill worker that a router has chosen."""

    worker_id: str
    address: str
    epoch: str


class _InvalidError(Exception):
    """Carries a refusal out of nested checks; never leaves this module."""

    def __init__(self, param: str, message: str, reason: Reason = Reason.INVALID_REQUEST) -> None:
        self.refusal = Refusal(reason, message, param)
        super().__init__(message)


def read_submit(message: pb.Submit, limits: Limits) -> Request | Refusal:
    """A request as a router submits it; its ``work`` is GENERATE."""
    try:
        _check_id(message.request_id)
        prompt = tuple(message.prompt_token_ids)
        output = tuple(message.output_token_ids)
        sampling = _read_sampling(message.sampling, limits)
        _check_tokens(prompt, output, limits)
        beam = _read_beam(message.beam) if message.HasField("beam") else None
        if beam is not None:
            sampling = _beam_sampling(beam, sampling, output, limits)
        if not (math.isfinite(message.deadline) and message.deadline >= 0):
            raise _InvalidError("deadline", f"deadline must be a time, not {message.deadline}")
        return Request(
            request_id=message.request_id,
            prompt_ids=prompt,
            output_ids=output,
            sampling=sampling,
            cache_salt=_read_salt(message.cache_salt),
            priority=message.priority,
            deadline=message.deadline or None,
            group=_read_group(message.group),
            beam=beam,
        )
    except _InvalidError as error:
        return error.refusal


def read_peer(message: pb.PrefillPeer) -> Peer | Refusal:
    """The address is a host and a port, none of gRPC's other schemes (unix:, xds:, ...)."""
    address = _ADDRESS.fullmatch(message.address)
    if address is None or not 0 < int(address["port"]) < 1 << 16:
        return Refusal(
            Reason.INVALID_REQUEST, f"{message.address!r} is not host:port", "prefill.address"
        )
    if not message.epoch:
        return Refusal(Reason.INVALID_REQUEST, "prefill.epoch must be set", "prefill.epoch")
    return Peer(message.worker_id, message.address, message.epoch)


def read_prefill(
    message: kv_pb.PrefillRequest, limits: Limits, deadline: float | None
) -> Request | Refusal:
    """A PREFILL request as another worker makes it. ``deadline``: seconds since the Unix epoch."""
    try:
        _check_id(message.request_id)
        tokens = tuple(message.token_ids)
        split = len(tokens) - message.num_output_tokens
        if split < 0:
            raise _InvalidError("num_output_tokens", "num_output_tokens exceeds the tokens given")
        sampling = _read_sampling(message.sampling, limits)
        _check_tokens(tokens[:split], tokens[split:], limits)
        cached = message.num_cached_tokens
        if cached % limits.block_size or cached >= len(tokens):
            raise _InvalidError(
                "num_cached_tokens",
                f"num_cached_tokens must be a multiple of {limits.block_size} and less than"
                f" {len(tokens)}, the tokens given, not {cached}",
            )
        return Request(
            request_id=message.request_id,
            prompt_ids=tokens[:split],
            output_ids=tokens[split:],
            sampling=sampling,
            cache_salt=_read_salt(message.cache_salt),
            priority=message.priority,
            deadline=deadline,
            work=Work.PREFILL,
            skip_tokens=cached,
        )
    except _InvalidError as error:
        return error.refusal


def _check_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= _MAX_ID_LENGTH:
        raise _InvalidError("request_id", f"request_id must have 1 to {_MAX_ID_LENGTH} characters")


def _read_beam(message: pb.BeamSearch) -> BeamParams:
    if message.width < 1:
        raise _InvalidError("n", "a beam search needs at least one beam")
    _check_range("length_penalty", message.length_penalty, *_LENGTH_PENALTY)
    return BeamParams(message.width, message.length_penalty)


def _beam_sampling(
    beam: BeamParams, sampling: SamplingParams, output: tuple[int, ...], limits: Limits
) -> SamplingParams:
    """Logprobs of as many tokens as the search looks at; nothing that it would pass over."""
    if output:
        raise _InvalidError("prompt", "a beam search cannot continue an output")
    plain = SamplingParams(
        temperature=0.0,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
    )
    if sampling != plain:
        raise _InvalidError("use_beam_search", "a beam search takes no sampling parameters")
    ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else limits.eos_token_ids)
    wanted = num_candidates(beam, len(ends))
    most = min(MAX_LOGPROBS, limits.vocab_size)
    if wanted > most:
        raise _InvalidError("n", f"beams and tokens that stop must be at most {most} together")
    return replace(plain, logprobs=wanted)


def _read_group(group: str) -> str:
    if len(group) > _MAX_ID_LENGTH:
        raise _InvalidError("group", f"group must have at most {_MAX_ID_LENGTH} characters")
    return group


def _read_salt(salt: bytes) -> bytes:
    if len(salt) > _MAX_SALT_BYTES:
        raise _InvalidError("cache_salt", f"cache_salt must have at most {_MAX_SALT_BYTES} bytes")
    return salt


def _check_tokens(prompt: tuple[int, ...], output: tuple[int, ...], limits: Limits) -> None:
    """A replay whose output is as long as it may be is no error: it ends with LENGTH."""
    if not prompt:
        raise _InvalidError("prompt", "the prompt must have at least one token")
    if len(prompt) >= limits.max_model_len:
        raise _InvalidError(
            "prompt",
            f"the prompt has {len(prompt)} tokens; with at least one token of output the limit is"
            f" {limits.max_model_len}: shorten it",
            Reason.CONTEXT_LENGTH_EXCEEDED,
        )
    _check_ids("prompt", prompt, limits)
    if output:
        _check_ids("prompt", output, limits)


def _check_ids(param: str, ids: Sequence[int], limits: Limits) -> None:
    worst = max(ids)
    if worst >= limits.vocab_size:
        raise _InvalidError(
            param, f"token id {worst} is out of the vocabulary of {limits.vocab_size} tokens"
        )


def _read_sampling(message: pb.SamplingParams, limits: Limits) -> SamplingParams:
    _check_range("temperature", message.temperature, 0, math.inf)
    _check_range("top_p", message.top_p, 0, 1)
    if message.top_p == 0:
        raise _InvalidError("top_p", "top_p must be more than 0; 1 turns it off")
    _check_range("min_p", message.min_p, 0, 1)
    _check_range("presence_penalty", message.presence_penalty, -_MAX_PENALTY, _MAX_PENALTY)
    _check_range("frequency_penalty", message.frequency_penalty, -_MAX_PENALTY, _MAX_PENALTY)
    _check_range("repetition_penalty", message.repetition_penalty, *_REPETITION_PENALTY)
    if message.max_tokens < 1:
        raise _InvalidError("max_tokens", "max_tokens must be at least 1")
    if message.min_tokens > message.max_tokens:
        raise _InvalidError("min_tokens", "min_tokens must not exceed max_tokens")
    if message.logit_bias:
        _check_ids("logit_bias", list(message.logit_bias), limits)
        for value in message.logit_bias.values():
            _check_range("logit_bias", value, -_MAX_BIAS, _MAX_BIAS)
    if message.stop_token_ids:
        _check_ids("stop_token_ids", message.stop_token_ids, limits)
    _check_count("logprobs", message.logprobs, limits)
    _check_count("prompt_logprobs", message.prompt_logprobs, limits)
    params = SamplingParams.from_proto(message)
    ends = params.stop_token_ids | limits.eos_token_ids
    if params.min_tokens and len(ends) >= limits.vocab_size:
        raise _InvalidError(
            "stop_token_ids", "with min_tokens, some token must be left that does not stop"
        )
    # Keeping the whole vocabulary is the same as keeping no count.
    return replace(params, top_k=0) if params.top_k >= limits.vocab_size else params


def _check_range(param: str, value: float, low: float, high: float) -> None:
    """NaN and infinities are in no range."""
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"{low:g} or more" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise _InvalidError(param, f"{param} must be a number {bounds}, not {value:g}")


def _check_count(param: str, value: int, limits: Limits) -> None:
    most = min(MAX_LOGPROBS, limits.vocab_size)
    if not -1 <= value <= most:
        raise _InvalidError(param, f"{param} must be in [-1, {most}], not {value}")
