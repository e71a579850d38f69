"""``use_beam_search``: the best ``n`` answers are searched for instead of drawn. Pure."""

from typing import Final

from kvasir.router.api.errors import ApiError, invalid
from kvasir.router.api.schemas import SamplingFields
from kvasir.router.contracts import BeamSearch

_DRAWS_NOTHING: Final = "it draws nothing"
_OWN_PROBABILITIES: Final = "it ranks by the model's own probabilities"
_ENDS: Final = "an answer ends at a token that ends it, or at max_tokens"
_NO_LOGPROBS: Final = "it keeps the score of an answer, not the logprobs of its tokens"

_NO_EFFECT: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "stream": ((), "its results are known at the end only"),
    "temperature": ((0,), _DRAWS_NOTHING),
    "top_p": ((1,), _DRAWS_NOTHING),
    "top_k": ((0, -1), _DRAWS_NOTHING),
    "min_p": ((0,), _DRAWS_NOTHING),
    "presence_penalty": ((0,), _OWN_PROBABILITIES),
    "frequency_penalty": ((0,), _OWN_PROBABILITIES),
    "repetition_penalty": ((1,), _OWN_PROBABILITIES),
    "logit_bias": (({},), _OWN_PROBABILITIES),
    "min_tokens": ((0,), _ENDS),
    "stop": (([],), _ENDS),
    "echo": ((), "its answers come without the prompt"),
    "logprobs": ((), _NO_LOGPROBS),
    "top_logprobs": ((), _NO_LOGPROBS),
}
"""Fields that a search has no use for: the values that ask for nothing, so that clients which
always send them are served, and why others are refused."""


def check_beam(body: SamplingFields) -> ApiError | None:
    """Nothing that a search would pass over in silence."""
    if not body.use_beam_search:
        if body.length_penalty is not None:
            return invalid("length_penalty", "needs use_beam_search: true")
        return None
    for name, (neutral, why) in _NO_EFFECT.items():
        value = getattr(body, name, None)
        if value is None or value is False or value in neutral:
            continue
        instead = f" or give {neutral[0]}" if neutral in ((0,), (1,)) else ""
        return invalid(name, f"cannot be used with use_beam_search: {why}; leave it out{instead}")
    return None


def beam_of(body: SamplingFields) -> BeamSearch | None:
    """As wide as the answer has choices."""
    if not body.use_beam_search:
        return None
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamSearch(body.n or 1, penalty)
