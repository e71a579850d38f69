"""Submits from routers: what becomes of each, and what is refused by name."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from helpers.worker_messages import LIMITS, submit
from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import (
    BeamParams,
    Finish,
    Hypothesis,
    Output,
    PrefillOutcome,
    PrefillReport,
    Work,
)
from kvasir.worker.service.convert import output_proto
from kvasir.worker.service.requests import read_submit


def test_a_submit_becomes_a_request() -> None:
    message = submit()
    message.output_token_ids.extend([5, 6])
    message.cache_salt = b"tenant"
    message.group = "g"
    message.priority = -3
    message.deadline = 1.5
    message.sampling.temperature = 0.5
    message.sampling.logit_bias[7] = -100
    message.sampling.seed = 2**64 - 1
    message.sampling.stop_token_ids.extend([3, 3, 4])
    message.sampling.logprobs = 0
    message.sampling.top_k = 5
    request = read_submit(message, LIMITS)
    assert not isinstance(request, Refusal)
    assert request.prompt_ids == (1, 2, 999)
    assert request.output_ids == (5, 6)
    assert (request.cache_salt, request.priority, request.deadline) == (b"tenant", -3, 1.5)
    assert request.group == "g"
    assert request.work is Work.GENERATE
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=5,
        logit_bias={7: -100.0},
        seed=2**64 - 1,
        max_tokens=10,
        stop_token_ids=frozenset({3, 4}),
        logprobs=0,
    )


def test_no_deadline_is_none() -> None:
    request = read_submit(submit(), LIMITS)
    assert not isinstance(request, Refusal)
    assert request.deadline is None


Spoil = Callable[[pb.Submit], object]
SPOILED: list[tuple[str, Spoil]] = [
    ("request_id", lambda m: setattr(m, "request_id", "")),
    ("request_id", lambda m: setattr(m, "request_id", "x" * 257)),
    ("prompt", lambda m: m.ClearField("prompt_token_ids")),
    ("prompt", lambda m: m.prompt_token_ids.append(1000)),
    ("prompt", lambda m: m.prompt_token_ids.append(2**32 - 1)),
    ("prompt", lambda m: m.output_token_ids.append(1000)),
    ("cache_salt", lambda m: setattr(m, "cache_salt", bytes(1025))),
    ("group", lambda m: setattr(m, "group", "g" * 257)),
    ("deadline", lambda m: setattr(m, "deadline", math.nan)),
    ("deadline", lambda m: setattr(m, "deadline", math.inf)),
    ("deadline", lambda m: setattr(m, "deadline", -1)),
    ("temperature", lambda m: setattr(m.sampling, "temperature", -1)),
    ("temperature", lambda m: setattr(m.sampling, "temperature", math.nan)),
    ("temperature", lambda m: setattr(m.sampling, "temperature", math.inf)),
    ("top_p", lambda m: setattr(m.sampling, "top_p", 0)),
    ("top_p", lambda m: setattr(m.sampling, "top_p", 1.5)),
    ("top_p", lambda m: setattr(m.sampling, "top_p", math.nan)),
    ("min_p", lambda m: setattr(m.sampling, "min_p", -0.1)),
    ("presence_penalty", lambda m: setattr(m.sampling, "presence_penalty", 2.5)),
    ("frequency_penalty", lambda m: setattr(m.sampling, "frequency_penalty", -math.inf)),
    ("repetition_penalty", lambda m: setattr(m.sampling, "repetition_penalty", 0)),
    ("repetition_penalty", lambda m: setattr(m.sampling, "repetition_penalty", 1e-38)),
    ("repetition_penalty", lambda m: setattr(m.sampling, "repetition_penalty", 0.0099)),
    ("repetition_penalty", lambda m: setattr(m.sampling, "repetition_penalty", 10.01)),
    ("repetition_penalty", lambda m: setattr(m.sampling, "repetition_penalty", math.nan)),
    ("max_tokens", lambda m: setattr(m.sampling, "max_tokens", 0)),
    ("min_tokens", lambda m: setattr(m.sampling, "min_tokens", 11)),
    ("logit_bias", lambda m: m.sampling.logit_bias.update({1000: 1.0})),
    ("logit_bias", lambda m: m.sampling.logit_bias.update({1: math.nan})),
    ("logit_bias", lambda m: m.sampling.logit_bias.update({1: 100.5})),
    ("stop_token_ids", lambda m: m.sampling.stop_token_ids.append(1000)),
    ("logprobs", lambda m: setattr(m.sampling, "logprobs", 21)),
    ("logprobs", lambda m: setattr(m.sampling, "logprobs", -2)),
    ("prompt_logprobs", lambda m: setattr(m.sampling, "prompt_logprobs", 21)),
]


@pytest.mark.parametrize(("param", "spoil"), SPOILED)
def test_a_bad_value_is_refused_by_name(param: str, spoil: Spoil) -> None:
    message = submit()
    spoil(message)
    refusal = read_submit(message, LIMITS)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)
    assert refusal.message


@pytest.mark.parametrize(
    ("prompt", "output", "fits"), [(99, 0, True), (100, 0, False), (95, 5, True), (95, 9, True)]
)
def test_a_prompt_leaves_room_for_a_token(prompt: int, output: int, fits: bool) -> None:
    message = submit()
    del message.prompt_token_ids[:]
    message.prompt_token_ids.extend([1] * prompt)
    message.output_token_ids.extend([1] * output)
    answer = read_submit(message, LIMITS)
    if fits:
        assert not isinstance(answer, Refusal)
    else:
        assert isinstance(answer, Refusal)
        assert answer.reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_a_replay_at_max_tokens_is_no_error() -> None:
    message = submit()
    message.output_token_ids.extend(range(10))
    assert not isinstance(read_submit(message, LIMITS), Refusal)


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_the_bounds_of_the_repetition_penalty_are_in(penalty: float) -> None:
    message = submit()
    message.sampling.repetition_penalty = penalty
    assert not isinstance(read_submit(message, LIMITS), Refusal)


@pytest.mark.parametrize(("min_tokens", "served"), [(0, True), (1, False)])
def test_with_min_tokens_some_token_must_not_stop(min_tokens: int, served: bool) -> None:
    limits = replace(LIMITS, vocab_size=10, eos_token_ids=frozenset({9}))
    message = submit()
    message.prompt_token_ids[:] = [1]
    message.sampling.min_tokens = min_tokens
    message.sampling.stop_token_ids.extend(range(8))
    assert not isinstance(read_submit(message, limits), Refusal)
    message.sampling.stop_token_ids.append(8)
    answer = read_submit(message, limits)
    if served:
        assert not isinstance(answer, Refusal)
    else:
        assert isinstance(answer, Refusal)
        assert answer.param == "stop_token_ids"


def test_all_of_the_vocabulary_is_no_top_k() -> None:
    message = submit()
    message.sampling.top_k = 2**32 - 1
    request = read_submit(message, LIMITS)
    assert not isinstance(request, Refusal)
    assert request.sampling.top_k == 0


@given(st.binary(max_size=200))
def test_any_submit_is_a_request_or_a_refusal(data: bytes) -> None:
    message = submit()
    try:
        message.MergeFromString(data)
    except DecodeError:
        return
    answer = read_submit(message, LIMITS)
    if not isinstance(answer, Refusal):
        assert max(answer.prompt_ids + answer.output_ids) < LIMITS.vocab_size
        assert math.isfinite(answer.sampling.temperature)


def searching(width: int = 3, **fields: object) -> pb.Submit:
    message = submit()
    message.sampling.temperature = 0
    message.beam.width = width
    message.beam.length_penalty = 0.5
    for name, value in fields.items():
        setattr(message.sampling, name, value)
    return message


def test_a_beam_search_looks_at_enough_candidates() -> None:
    message = searching()
    message.sampling.stop_token_ids.extend([3, 4])
    request = read_submit(message, LIMITS)
    assert not isinstance(request, Refusal)
    assert request.beam == BeamParams(3, 0.5)
    ends = len({3, 4} | LIMITS.eos_token_ids)
    assert request.sampling.logprobs == 3 + ends


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (searching(0), "n"),
        (searching(21), "n"),
        (searching(temperature=0.5), "use_beam_search"),
        (searching(logprobs=2), "use_beam_search"),
        (searching(repetition_penalty=1.5), "use_beam_search"),
    ],
)
def test_a_beam_search_that_cannot_be_is_refused(message: pb.Submit, param: str) -> None:
    refusal = read_submit(message, LIMITS)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.param) == (Reason.INVALID_REQUEST, param)


def test_a_beam_search_continues_no_output_and_has_a_finite_penalty() -> None:
    message = searching()
    message.output_token_ids.append(5)
    refusal = read_submit(message, LIMITS)
    assert isinstance(refusal, Refusal)
    message = searching()
    message.beam.length_penalty = math.inf
    refusal = read_submit(message, LIMITS)
    assert isinstance(refusal, Refusal)
    assert refusal.param == "length_penalty"


def test_hypotheses_reach_the_router() -> None:
    found = (Hypothesis((1, 2), Finish.STOP, -0.5), Hypothesis((3,), Finish.LENGTH, -1.5))
    report = PrefillReport(16, PrefillOutcome.REMOTE)
    output = Output("r", finish=Finish.STOP, prefill=report, hypotheses=found)
    message = output_proto(output, "p")
    assert [(list(one.token_ids), one.finish_reason, one.score) for one in message.hypotheses] == [
        ([1, 2], pb.FINISH_REASON_STOP, -0.5),
        ([3], pb.FINISH_REASON_LENGTH, -1.5),
    ]
    assert message.finish_reason == pb.FINISH_REASON_STOP
    assert message.prefill.prefill_worker_id == "p"
