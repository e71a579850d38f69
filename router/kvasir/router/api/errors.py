"""What a client sees when a request is not served.

One value, ``ApiError``, becomes every error body and status of the API, so that all have the
same shape. Expected refusals travel as values; this module sends nothing by itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from kvasir.proto.errors import Reason, Refusal
from kvasir.router.api.responses import ErrorBody

_RETRYABLE = frozenset({429, 503})
_DEFAULT_RETRY_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class ApiError:
    """Status and the fields of an OpenAI error object.

    ``retry_after`` is seconds; 429 and 503 always carry it.
    """

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, refusal: Refusal, retry_after: float | None = None) -> "ApiError":
        codes = refusal.codes
        if codes.http in _RETRYABLE and retry_after is None:
            retry_after = _DEFAULT_RETRY_AFTER
        return cls(codes.http, codes.type, codes.code, refusal.message, refusal.param, retry_after)

    def body(self) -> ErrorBody:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        response = web.json_response(self.body(), status=self.status, headers=headers)
        if self.retry_after is not None:
            response.headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return response


def invalid(param: str | None, problem: str) -> ApiError:
    """400 for one field: ``problem`` continues a sentence that begins with the field."""
    message = f"{param} {problem}" if param else problem
    return ApiError.of(Refusal(Reason.INVALID_REQUEST, message, param))


def too_long(message: str, param: str) -> ApiError:
    return ApiError.of(Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, message, param))


def too_large(limit: int) -> ApiError:
    message = f"the request body is larger than {limit} bytes; send a shorter one"
    return ApiError.of(Refusal(Reason.PAYLOAD_TOO_LARGE, message))


def http_error(status: int, code: str, message: str) -> ApiError:
    """An error of HTTP itself: no such path, method or media type."""
    return ApiError(status, "invalid_request_error", code, message)


def malformed(problem: str) -> ApiError:
    """400 for bytes that are no HTTP request; ``problem`` is a clause."""
    return http_error(400, "malformed_request", f"the request is not valid HTTP: {problem}")


def internal() -> ApiError:
    """The cause is in the log, under the request's id, and never in the response."""
    message = "internal error of the router; its log has the cause under the x-request-id"
    return ApiError.of(Refusal(Reason.INTERNAL, message))
