"""Contracts to protobuf: what a worker says to routers and to other workers.

The way in, which has everything to check, is ``requests.py``.
"""

from collections.abc import Sequence

from kvasir.proto.errors import Refusal
from kvasir.proto.sampling import TokenLogprobs
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import (
    BlocksRemoved,
    BlocksStored,
    Finish,
    KvEvent,
    Load,
    Output,
    PrefillOutcome,
    PrefillReport,
)

_FINISH = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORTED: pb.FINISH_REASON_ABORTED,
    Finish.REFUSED: pb.FINISH_REASON_REFUSED,
}
_OUTCOME = {
    PrefillOutcome.LOCAL: pb.PREFILL_OUTCOME_LOCAL,
    PrefillOutcome.REMOTE: pb.PREFILL_OUTCOME_REMOTE,
    PrefillOutcome.RECOMPUTED: pb.PREFILL_OUTCOME_RECOMPUTED,
}


def _logprobs_proto(value: TokenLogprobs | None) -> pb.TokenLogprobs:
    """None, for a first prompt token, is an empty message."""
    return pb.TokenLogprobs() if value is None else value.to_proto()


def output_proto(output: Output, prefill_worker_id: str = "") -> pb.SequenceOutput:
    """``prefill_worker_id`` is named only where that worker was asked."""
    return pb.SequenceOutput(
        request_id=output.request_id,
        token_ids=output.token_ids,
        logprobs=[one.to_proto() for one in output.logprobs],
        finish_reason=_FINISH[output.finish] if output.finish else pb.FINISH_REASON_UNSPECIFIED,
        refusal=output.refusal.to_proto() if output.refusal is not None else None,
        prefill=_report_proto(output.prefill, prefill_worker_id) if output.prefill else None,
        prompt_logprobs=[_logprobs_proto(one) for one in output.prompt_logprobs],
        hypotheses=[
            pb.Hypothesis(
                token_ids=one.token_ids, finish_reason=_FINISH[one.finish], score=one.score
            )
            for one in output.hypotheses
        ],
    )


def _report_proto(report: PrefillReport, prefill_worker_id: str) -> pb.PrefillReport:
    return pb.PrefillReport(
        cached_tokens=report.cached_tokens,
        outcome=_OUTCOME[report.outcome],
        prefill_worker_id="" if report.outcome is PrefillOutcome.LOCAL else prefill_worker_id,
        peer_fault=report.peer_fault,
    )


def refused_proto(request_id: str, refusal: Refusal) -> pb.SequenceOutput:
    return output_proto(Output(request_id, finish=Finish.REFUSED, refusal=refusal))


def events_proto(first_sequence: int, events: Sequence[KvEvent]) -> pb.KvEventBatch:
    return pb.KvEventBatch(
        first_sequence=first_sequence, events=[_event_proto(event) for event in events]
    )


def _event_proto(event: KvEvent) -> pb.KvEvent:
    match event:
        case BlocksStored(parent_hash, hashes):
            return pb.KvEvent(stored=pb.BlocksStored(parent_hash=parent_hash, block_hashes=hashes))
        case BlocksRemoved(hashes):
            return pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=hashes))


def load_proto(load: Load, *, draining: bool, role: pb.Role.ValueType) -> pb.LoadReport:
    return pb.LoadReport(
        running=load.running,
        waiting=load.waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        active_kv_tokens=load.active_kv_tokens,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_cached=load.kv_blocks_cached,
        prefix_query_tokens=load.prefix_query_tokens,
        prefix_hit_tokens=load.prefix_hit_tokens,
        preemptions=load.preemptions,
        kv_slots_filled=load.kv.filled,
        kv_slots_reserved=load.kv.reserved,
        kv_slots_internal_waste=load.kv.internal,
        kv_slots_external_waste=load.kv.external,
        kv_block_table_entries=load.kv.table_entries,
        draft_tokens=load.draft_tokens,
        accepted_tokens=load.accepted_tokens,
        draining=draining,
        role=role,
    )
