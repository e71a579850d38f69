"""The closed set of refusal reasons is complete on every side."""

import grpc
import pytest

from kvasir.proto.errors import CODES, Reason, Refusal
from kvasir.proto.v1 import engine_pb2 as pb


def test_reasons_equal_the_protobuf_enum() -> None:
    names = {n.removeprefix("REFUSAL_REASON_"): v for n, v in pb.RefusalReason.items()}
    del names["UNSPECIFIED"]
    assert {r.name: r.value for r in Reason} == names


def test_every_reason_has_codes() -> None:
    assert set(CODES) == set(Reason)
    assert {codes.grpc for codes in CODES.values()} <= set(grpc.StatusCode.__members__)


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_survives_the_wire(reason: Reason) -> None:
    for param in ("messages", None):
        refusal = Refusal(reason, "Say what is wrong.", param)
        data = refusal.to_proto().SerializeToString()
        assert Refusal.from_proto(pb.Refusal.FromString(data)) == refusal


def test_an_unknown_reason_reads_as_internal() -> None:
    message = pb.Refusal(message="from the future")
    message.reason = 99  # type: ignore[assignment]  # a newer peer's value
    assert Refusal.from_proto(message).reason is Reason.INTERNAL
