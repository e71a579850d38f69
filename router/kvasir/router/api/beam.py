"""``use_beam_search``: the best ``n`` answers are searched for instead of drawn. Pure."""

from typing import Final

from kvasir.router.api.errors import ApiError, invalid
from kvasir.router.api.schemas import SamplingFields
from kvasir.router.contracts import BeamSearch

_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "stream": (),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([],),
    "echo": (),
    "logprobs": (),
    "top_logprobs": (),
}
"""Fields that have no meaning in a search, with the values that ask for nothing."""


def check_beam(body: SamplingFields) -> ApiError | None:
    """Nothing that a search would pass over in silence."""
    if not body.use_beam_search:
        if body.length_penalty is not None:
            return invalid("length_penalty", "needs use_beam_search: true")
        return None
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name, None)
        if value is None or value is False or value in neutral:
            continue
        why = "its results are known at the end only" if name == "stream" else "which draws nothing"
        return invalid(name, f"cannot be used with use_beam_search, {why}; leave it out")
    return None


def beam_of(body: SamplingFields) -> BeamSearch | None:
    """As wide as the answer has choices."""
    if not body.use_beam_search:
        return None
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamSearch(body.n or 1, penalty)
