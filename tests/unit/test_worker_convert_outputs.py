"""What a worker tells routers: outputs, refusals, KV events and load."""

from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.sampling import TokenLogprobs
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import (
    BlocksRemoved,
    BlocksStored,
    Finish,
    KvUsage,
    Load,
    Output,
    PrefillOutcome,
    PrefillReport,
)
from kvasir.worker.service.convert import events_proto, load_proto, output_proto, refused_proto


def test_an_output_becomes_a_message() -> None:
    logprobs = TokenLogprobs(-0.5, 1, ((4, -0.5), (9, -2.0)))
    output = Output(
        "r1",
        token_ids=(4,),
        logprobs=(logprobs,),
        finish=Finish.STOP,
        prefill=PrefillReport(32, PrefillOutcome.RECOMPUTED, peer_fault=True),
        prompt_logprobs=(None, logprobs),
    )
    message = output_proto(output, "p-0")
    assert list(message.token_ids) == [4]
    assert message.finish_reason == pb.FINISH_REASON_STOP
    assert message.prefill == pb.PrefillReport(
        cached_tokens=32,
        outcome=pb.PREFILL_OUTCOME_RECOMPUTED,
        prefill_worker_id="p-0",
        peer_fault=True,
    )
    assert [m.rank for m in message.prompt_logprobs] == [0, 1]
    assert TokenLogprobs.from_proto(message.logprobs[0]) == logprobs


def test_an_output_without_news_has_no_finish() -> None:
    message = output_proto(Output("r1", token_ids=(1,)))
    assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert not message.HasField("prefill")
    assert not message.HasField("refusal")


def test_a_refusal_becomes_a_last_output() -> None:
    refusal = Refusal(Reason.QUEUE_FULL, "Retry later.")
    message = refused_proto("r1", refusal)
    assert message.finish_reason == pb.FINISH_REASON_REFUSED
    assert Refusal.from_proto(message.refusal) == refusal


def test_events_keep_their_order_and_kind() -> None:
    batch = events_proto(7, [BlocksStored(b"p", (b"a", b"b")), BlocksRemoved((b"a",))])
    assert batch.first_sequence == 7
    assert [event.WhichOneof("kind") for event in batch.events] == ["stored", "removed"]
    assert batch.events[0].stored == pb.BlocksStored(parent_hash=b"p", block_hashes=[b"a", b"b"])


def test_every_number_of_a_load_is_reported() -> None:
    metrics_alone = {"drafts", "prefill_tokens", "busy_seconds"}
    told_otherwise = metrics_alone | {"kv"}
    fields = [name for name in Load.__dataclass_fields__ if name not in told_otherwise]
    load = Load(
        **{name: index for index, name in enumerate(fields, 1)}, kv=KvUsage(101, 102, 103, 104, 105)
    )
    report = load_proto(load, draining=True, role=pb.ROLE_DECODE)
    assert {name: getattr(report, name) for name in fields} == {
        name: index for index, name in enumerate(fields, 1)
    }
    assert (report.kv_slots_filled, report.kv_slots_reserved) == (101, 102)
    assert (report.kv_slots_internal_waste, report.kv_slots_external_waste) == (103, 104)
    assert report.kv_block_table_entries == 105
    assert report.draining
    assert report.role == pb.ROLE_DECODE
