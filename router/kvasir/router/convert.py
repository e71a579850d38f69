"""Between the router's own types and engine.proto. Pure: no I/O, no policy."""

from collections.abc import Sequence

from kvasir.proto.sampling import TokenLogprobs
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.contracts import FinishReason, Found, Generation, Hypothesis, TokenEvent
from kvasir.router.cost import Group, Role
from kvasir.router.prefix_index import CacheEvent, Cleared, Removed, Stored

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_ROLES: dict[int, Role] = {
    pb.ROLE_PREFILL: "prefill",
    pb.ROLE_DECODE: "decode",
    pb.ROLE_BOTH: "both",
}


def role_of(role: int) -> Role | None:
    """None for a role that this version does not know."""
    return _ROLES.get(role)


def group_of(info: pb.WorkerInfo) -> Group:
    """What a worker must share with others to stand in for them."""
    layout = info.layout
    form = (layout.model_fingerprint, layout.dtype, layout.quantization)
    return Group(
        model=info.model,
        tokenizer_hash=info.tokenizer_hash,
        fingerprint="/".join(form),
        revision=info.revision,
        block_size=layout.block_size,
    )


def submit_to_proto(
    generation: Generation,
    wire_id: str,
    output_ids: Sequence[int],
    prefill: pb.PrefillPeer | None,
) -> pb.Submit:
    """A submit of a new request, or of one that has already given ``output_ids``.

    Prompt logprobs come with the first tokens, so a replay does not ask for them again.
    """
    submit = pb.Submit(
        request_id=wire_id,
        prompt_token_ids=generation.prompt_ids,
        output_token_ids=output_ids,
        sampling=generation.sampling.to_proto(),
        cache_salt=generation.cache_salt,
        priority=generation.priority,
        group=generation.group,
    )
    if generation.beam is not None:
        beam = generation.beam
        submit.beam.CopyFrom(pb.BeamSearch(width=beam.width, length_penalty=beam.length_penalty))
    if output_ids:
        submit.sampling.prompt_logprobs = -1
    if prefill is not None:
        submit.prefill.CopyFrom(prefill)
    return submit


def first_event(output: pb.SequenceOutput, decode_worker: str) -> TokenEvent:
    """The first tokens of a generation, with what is told about its prompt."""
    report = output.prefill
    remote = report.outcome == pb.PREFILL_OUTCOME_REMOTE
    # The first prompt token has nothing before it, hence no logprob.
    prompt = [TokenLogprobs.from_proto(entry) for entry in output.prompt_logprobs[1:]]
    return TokenEvent(
        token_ids=tuple(output.token_ids),
        logprobs=tuple(map(TokenLogprobs.from_proto, output.logprobs)),
        cached_tokens=report.cached_tokens if output.HasField("prefill") else None,
        decode_worker=decode_worker,
        prefill_worker=report.prefill_worker_id if remote else None,
        prompt_logprobs=(None, *prompt) if output.prompt_logprobs else (),
    )


def found_event(output: pb.SequenceOutput, decode_worker: str) -> Found:
    """What a beam search has found, with what is told about its prompt."""
    first = first_event(output, decode_worker)
    hypotheses = tuple(
        Hypothesis(tuple(one.token_ids), FINISH_REASONS[one.finish_reason], one.score)
        for one in output.hypotheses
    )
    return Found(hypotheses, first.cached_tokens, decode_worker, first.prefill_worker)


def next_event(output: pb.SequenceOutput) -> TokenEvent:
    return TokenEvent(
        token_ids=tuple(output.token_ids),
        logprobs=tuple(map(TokenLogprobs.from_proto, output.logprobs)),
    )


def cache_events(batch: pb.KvEventBatch) -> list[CacheEvent]:
    """One entry per event, so that sequence numbers stay right.

    An event of a kind that this version does not know counts as one that changes nothing.
    """
    events: list[CacheEvent] = []
    for event in batch.events:
        match event.WhichOneof("kind"):
            case "stored":
                events.append(Stored(list(event.stored.block_hashes)))
            case "removed":
                events.append(Removed(list(event.removed.block_hashes)))
            case "cleared":
                events.append(Cleared())
            case _:
                events.append(Removed(()))
    return events
