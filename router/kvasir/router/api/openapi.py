"""The OpenAPI document, made from the types that requests and responses really have."""

from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from kvasir.router.api import responses, schemas

_SCHEMAS = "#/components/schemas/{model}"
_ERROR = "An error; 400, 401, 404, 413, 415, 429, 5xx"

_POSTS: dict[str, tuple[str, Any, Any]] = {
    "/v1/chat/completions": (
        "Answer a conversation",
        schemas.ChatRequest,
        responses.ChatCompletion,
    ),
    "/v1/completions": ("Continue a text", schemas.CompletionRequest, responses.Completion),
    "/tokenize": ("Text or messages to token ids", schemas.TokenizeRequest, responses.Tokens),
    "/detokenize": ("Token ids to text", schemas.DetokenizeRequest, responses.Text),
}
_GETS: dict[str, tuple[str, Any]] = {
    "/v1/models": ("The served models", responses.ModelList),
    "/v1/models/{model}": ("One served model", responses.ModelInfo),
}
_PLAIN = {
    "/health": "200 while this router is alive, 503 once it shuts down",
    "/ready": "200 if a request sent now would be served, else 503",
    "/metrics": "Prometheus metrics",
    "/workers": "The workers as this router sees them",
    "/openapi.json": "This document",
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1; streamed answers are server-sent events of chunks."""
    types: dict[str, Any] = {"ErrorBody": responses.ErrorBody, "ChatChunk": responses.ChatChunk}
    paths: dict[str, Any] = {}
    for path, (summary, taken, given) in _POSTS.items():
        types |= {taken.__name__: taken, given.__name__: given}
        operation = _operation(summary, given)
        operation["requestBody"] = {"required": True, "content": _json(taken)}
        paths[path] = {"post": operation}
    for path, (summary, given) in _GETS.items():
        types[given.__name__] = given
        paths[path] = {"get": _operation(summary, given)}
    for path, summary in _PLAIN.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir", "version": "1"},
        "paths": paths,
        "components": {"schemas": _components(types)},
    }


def _operation(summary: str, given: Any) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": _json(given)},
            "default": {"description": _ERROR, "content": _json(responses.ErrorBody)},
        },
    }


def _json(type_: Any) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=type_.__name__)}}}


def _components(types: dict[str, Any]) -> dict[str, Any]:
    mode: Literal["validation"] = "validation"
    inputs = [(name, mode, TypeAdapter(kind)) for name, kind in types.items()]
    _, definitions = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMAS)
    return dict(definitions["$defs"])
