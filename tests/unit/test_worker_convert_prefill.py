"""Prefill requests and the peers that are named in submits."""

import pytest

from helpers.worker_messages import LIMITS, prefill
from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import Work
from kvasir.worker.service.requests import Peer, read_peer, read_prefill


@pytest.mark.parametrize("address", ["10.0.0.1:5000", "worker-0.svc:1", "[::1]:65535"])
def test_a_peer_is_read(address: str) -> None:
    message = pb.PrefillPeer(worker_id="p", address=address, epoch="e")
    assert read_peer(message) == Peer("p", address, "e")


@pytest.mark.parametrize(
    ("address", "epoch", "param"),
    [
        ("", "e", "prefill.address"),
        ("host", "e", "prefill.address"),
        (":1", "e", "prefill.address"),
        ("host:0", "e", "prefill.address"),
        ("host:65536", "e", "prefill.address"),
        ("host:1x", "e", "prefill.address"),
        ("unix:/run/x.sock", "e", "prefill.address"),
        ("unix:/run/x:5", "e", "prefill.address"),
        ("host:1", "", "prefill.epoch"),
    ],
)
def test_a_bad_peer_is_refused(address: str, epoch: str, param: str) -> None:
    refusal = read_peer(pb.PrefillPeer(address=address, epoch=epoch))
    assert isinstance(refusal, Refusal)
    assert refusal.param == param


# --- prefill requests ------------------------------------------------------------------------


def test_a_prefill_becomes_a_request() -> None:
    message = prefill()
    message.num_cached_tokens = 32
    request = read_prefill(message, LIMITS, deadline=9.0)
    assert not isinstance(request, Refusal)
    assert request.prompt_ids == tuple(range(37))
    assert request.output_ids == (37, 38, 39)
    assert (request.work, request.skip_tokens, request.deadline) == (Work.PREFILL, 32, 9.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_cached_tokens", 15),
        ("num_cached_tokens", 48),
        ("num_output_tokens", 40),
        ("num_output_tokens", 41),
        ("request_id", ""),
        ("cache_salt", bytes(1025)),
    ],
)
def test_a_bad_prefill_is_refused(field: str, value: object) -> None:
    message = prefill()
    setattr(message, field, value)
    refusal = read_prefill(message, LIMITS, deadline=None)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.INVALID_REQUEST


def test_a_prefill_of_whole_blocks_computes_the_last_token() -> None:
    message = prefill()
    del message.token_ids[32:]
    message.num_cached_tokens = 32
    assert isinstance(read_prefill(message, LIMITS, deadline=None), Refusal)
    message.num_cached_tokens = 16
    assert not isinstance(read_prefill(message, LIMITS, deadline=None), Refusal)


def test_sampling_survives_the_way_to_the_holder() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={3: 2.5},
        seed=11,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=frozenset({8, 9}),
        logprobs=4,
        prompt_logprobs=2,
    )
    message = prefill()
    message.sampling.CopyFrom(params.to_proto())
    request = read_prefill(message, LIMITS, deadline=None)
    assert not isinstance(request, Refusal)
    assert request.sampling == params
