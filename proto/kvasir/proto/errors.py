"""Why a request is not served: the closed set of reasons and their codes, in one place.

An expected refusal is a value (``Refusal``) that travels from the worker over the router
to the client. ``CODES`` maps each reason to what HTTP clients and gRPC peers see.
"""

from dataclasses import dataclass
from enum import IntEnum

from kvasir.proto.v1 import engine_pb2 as pb


class Reason(IntEnum):
    """``RefusalReason`` of engine.proto; a test holds the two equal."""

    INVALID_REQUEST = pb.REFUSAL_REASON_INVALID_REQUEST
    CONTEXT_LENGTH_EXCEEDED = pb.REFUSAL_REASON_CONTEXT_LENGTH_EXCEEDED
    MODEL_NOT_FOUND = pb.REFUSAL_REASON_MODEL_NOT_FOUND
    UNAUTHENTICATED = pb.REFUSAL_REASON_UNAUTHENTICATED
    PAYLOAD_TOO_LARGE = pb.REFUSAL_REASON_PAYLOAD_TOO_LARGE
    QUEUE_FULL = pb.REFUSAL_REASON_QUEUE_FULL
    NO_CAPACITY = pb.REFUSAL_REASON_NO_CAPACITY
    DRAINING = pb.REFUSAL_REASON_DRAINING
    LAYOUT_MISMATCH = pb.REFUSAL_REASON_LAYOUT_MISMATCH
    EPOCH_MISMATCH = pb.REFUSAL_REASON_EPOCH_MISMATCH
    DEADLINE_EXCEEDED = pb.REFUSAL_REASON_DEADLINE_EXCEEDED
    CANCELLED = pb.REFUSAL_REASON_CANCELLED
    INTERNAL = pb.REFUSAL_REASON_INTERNAL


@dataclass(frozen=True, slots=True)
class Codes:
    """What one reason looks like outside.

    ``grpc`` is the name of a gRPC status code: only who calls gRPC needs to import it.
    ``type`` and ``code`` are the fields of an OpenAI error object. ``retry_elsewhere``
    says whether another worker may well serve the same request.
    """

    http: int
    grpc: str
    type: str
    code: str
    retry_elsewhere: bool = False


_INVALID = "invalid_request_error"
_SERVER = "server_error"

CODES: dict[Reason, Codes] = {
    Reason.INVALID_REQUEST: Codes(400, "INVALID_ARGUMENT", _INVALID, "invalid_value"),
    Reason.CONTEXT_LENGTH_EXCEEDED: Codes(400, "OUT_OF_RANGE", _INVALID, "context_length_exceeded"),
    Reason.MODEL_NOT_FOUND: Codes(404, "NOT_FOUND", _INVALID, "model_not_found"),
    Reason.UNAUTHENTICATED: Codes(
        401, "UNAUTHENTICATED", "authentication_error", "invalid_api_key"
    ),
    Reason.PAYLOAD_TOO_LARGE: Codes(413, "INVALID_ARGUMENT", _INVALID, "payload_too_large"),
    Reason.QUEUE_FULL: Codes(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "queue_full", True),
    Reason.NO_CAPACITY: Codes(503, "UNAVAILABLE", _SERVER, "no_capacity", True),
    Reason.DRAINING: Codes(503, "UNAVAILABLE", _SERVER, "draining", True),
    Reason.LAYOUT_MISMATCH: Codes(503, "FAILED_PRECONDITION", _SERVER, "layout_mismatch", True),
    Reason.EPOCH_MISMATCH: Codes(503, "FAILED_PRECONDITION", _SERVER, "epoch_mismatch", True),
    Reason.DEADLINE_EXCEEDED: Codes(504, "DEADLINE_EXCEEDED", _SERVER, "deadline_exceeded"),
    Reason.CANCELLED: Codes(499, "CANCELLED", _INVALID, "cancelled"),
    Reason.INTERNAL: Codes(500, "INTERNAL", _SERVER, "internal_error"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused request.

    ``message`` is one sentence for the client: what is wrong and how to mend it.
    ``param`` names the request field at fault, if one is.
    """

    reason: Reason
    message: str
    param: str | None = None

    @property
    def codes(self) -> Codes:
        return CODES[self.reason]

    def to_proto(self) -> pb.Refusal:
        return pb.Refusal(
            reason=pb.RefusalReason.ValueType(self.reason),
            message=self.message,
            param=self.param or "",
        )

    @classmethod
    def from_proto(cls, message: pb.Refusal) -> "Refusal":
        """An unknown reason, from a newer peer, reads as INTERNAL."""
        known = message.reason in Reason._value2member_map_
        reason = Reason(message.reason) if known else Reason.INTERNAL
        return cls(reason, message.message, message.param or None)
