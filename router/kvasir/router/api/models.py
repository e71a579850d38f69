"""GET /v1/models and /v1/models/{id}."""

from aiohttp import web

from kvasir.proto.errors import Reason, Refusal
from kvasir.router.api.context import API, Api
from kvasir.router.api.errors import ApiError
from kvasir.router.api.responses import ModelInfo, ModelList


async def list_models(request: web.Request) -> web.StreamResponse:
    models: ModelList = {"object": "list", "data": _models(request.app[API])}
    return web.json_response(models)


async def get_model(request: web.Request) -> web.StreamResponse | ApiError:
    name = request.match_info["model"]
    for model in _models(request.app[API]):
        if model["id"] == name:
            return web.json_response(model)
    message = f"model '{name}' is not served here; GET /v1/models lists what is"
    return ApiError.of(Refusal(Reason.MODEL_NOT_FOUND, message, "model"))


def _models(api: Api) -> list[ModelInfo]:
    card = api.dispatcher.model()
    if card is None:
        return []
    return [
        {
            "id": card.name,
            "object": "model",
            "created": api.started,
            "owned_by": "kvasir",
            "max_model_len": card.max_model_len,
        }
    ]
