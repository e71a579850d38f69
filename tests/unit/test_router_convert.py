"""Router types to and from engine.proto."""

from dataclasses import asdict
from unittest.mock import create_autospec

import pytest

from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.contracts import BeamSearch, FinishReason, Found, Generation, Hypothesis
from kvasir.router.convert import (
    cache_events,
    first_event,
    found_event,
    group_of,
    role_of,
    submit_to_proto,
)
from kvasir.router.cost import Role
from kvasir.router.member import Member
from kvasir.router.prefix_index import Cleared, Removed, Stored
from kvasir.router.worker_link import WorkerLink


def test_a_new_request_and_its_replay() -> None:
    sampling = SamplingParams(seed=2**63, max_tokens=9, prompt_logprobs=2)
    generation = Generation("r", (1, 2), sampling, b"salt", priority=-3, group="g")
    new = submit_to_proto(generation, "r", [], None)
    assert (new.request_id, list(new.prompt_token_ids)) == ("r", [1, 2])
    assert (new.cache_salt, new.priority, new.deadline) == (b"salt", -3, 0)
    assert (new.sampling.seed, new.sampling.logprobs) == (2**63, -1)
    assert new.sampling.prompt_logprobs == 2
    assert not new.HasField("prefill")
    replay = submit_to_proto(generation, "r~1", [7, 8], pb.PrefillPeer(worker_id="p"))
    assert list(replay.output_token_ids) == [7, 8]
    assert new.group == replay.group == "g"
    assert replay.sampling.prompt_logprobs == -1
    assert replay.prefill.worker_id == "p"


@pytest.mark.parametrize(
    ("wire", "role"),
    [
        (pb.ROLE_PREFILL, "prefill"),
        (pb.ROLE_DECODE, "decode"),
        (pb.ROLE_BOTH, "both"),
        (pb.ROLE_UNSPECIFIED, None),
        (99, None),
    ],
)
def test_roles(wire: int, role: Role | None) -> None:
    assert role_of(wire) == role


@pytest.mark.parametrize(
    ("outcome", "prefill_worker"),
    [
        (pb.PREFILL_OUTCOME_REMOTE, "p"),
        (pb.PREFILL_OUTCOME_RECOMPUTED, None),
        (pb.PREFILL_OUTCOME_LOCAL, None),
    ],
)
def test_first_event_names_a_prefill_worker_only_if_it_computed_the_prompt(
    outcome: pb.PrefillOutcome.ValueType, prefill_worker: str | None
) -> None:
    report = pb.PrefillReport(cached_tokens=32, outcome=outcome, prefill_worker_id="p")
    event = first_event(pb.SequenceOutput(token_ids=[5], prefill=report), "d")
    assert (event.decode_worker, event.prefill_worker, event.cached_tokens) == (
        "d",
        prefill_worker,
        32,
    )


def test_every_cache_event_counts_one() -> None:
    batch = pb.KvEventBatch(
        first_sequence=1,
        events=[
            pb.KvEvent(stored=pb.BlocksStored(block_hashes=[b"a"])),
            pb.KvEvent(),  # a kind that this version does not know
            pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=[b"b"])),
            pb.KvEvent(cleared=pb.CacheCleared()),
        ],
    )
    assert cache_events(batch) == [Stored([b"a"]), Removed(()), Removed([b"b"]), Cleared()]


def test_quantised_weights_are_other_weights() -> None:
    plain = pb.WorkerInfo(layout=pb.KvLayout(model_fingerprint="f", block_size=16))
    int8 = pb.WorkerInfo(
        layout=pb.KvLayout(model_fingerprint="f", block_size=16, quantization="int8")
    )
    assert not group_of(plain).serves(group_of(int8))


def test_a_beam_search_and_what_it_found() -> None:
    generation = Generation("r", (1,), SamplingParams(), beam=BeamSearch(3, 0.5))
    submit = submit_to_proto(generation, "r", [], None)
    assert (submit.beam.width, submit.beam.length_penalty) == (3, 0.5)
    assert not submit_to_proto(Generation("r", (1,), SamplingParams()), "r", [], None).HasField(
        "beam"
    )
    output = pb.SequenceOutput(
        prefill=pb.PrefillReport(
            cached_tokens=16, outcome=pb.PREFILL_OUTCOME_REMOTE, prefill_worker_id="p"
        ),
        hypotheses=[
            pb.Hypothesis(token_ids=[1, 2], finish_reason=pb.FINISH_REASON_STOP, score=-0.5),
            pb.Hypothesis(token_ids=[3], finish_reason=pb.FINISH_REASON_LENGTH, score=-1.5),
        ],
    )
    assert found_event(output, "d") == Found(
        (
            Hypothesis((1, 2), FinishReason.STOP, -0.5),
            Hypothesis((3,), FinishReason.LENGTH, -1.5),
        ),
        16,
        "d",
        "p",
    )


def test_the_numbers_of_a_report_are_in_the_status() -> None:
    member = Member("w", "", create_autospec(WorkerLink, instance=True))
    numbers = {name: n for name, n in asdict(member.status()).items() if isinstance(n, int)}
    assert set(numbers.values()) == {0}, "an older worker tells less"
    told = {name: index for index, name in enumerate(numbers, 1)}
    for name, index in told.items():
        setattr(member.report, name, index)
    status = asdict(member.status())
    assert {name: status[name] for name in numbers} == told
    assert {"kv_slots_filled", "draft_tokens", "accepted_tokens"} <= set(told)
