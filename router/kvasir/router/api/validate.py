"""What the schemas do not check: limits of numbers and text, vocabulary, window.

Pure: takes a parsed request, gives ``SamplingParams`` or the ``ApiError`` that says which field is
wrong and why.
"""

import hashlib
import secrets
from dataclasses import replace

from kvasir.proto.sampling import SamplingParams
from kvasir.router.api.errors import ApiError, invalid, too_long
from kvasir.router.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from kvasir.router.config import Limits
from kvasir.router.contracts import ModelCard

_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions; a chat answer may fill the window."""
_SEED_BITS = 64
_SEED_DOMAIN = b"kvasir.child-seed.v1"


def check_chat(body: ChatRequest, limits: Limits, card: ModelCard) -> ApiError | None:
    if body.top_logprobs is not None and not body.logprobs:
        return invalid("top_logprobs", "needs logprobs: true")
    if (body.top_logprobs or 0) > limits.max_logprobs:
        return invalid("top_logprobs", f"must be at most {limits.max_logprobs}")
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        return invalid("max_completion_tokens", "must equal max_tokens where both are given")
    return _check_sampling(body, limits, card)


def check_completion(body: CompletionRequest, limits: Limits, card: ModelCard) -> ApiError | None:
    if (body.logprobs or 0) > limits.max_logprobs:
        return invalid("logprobs", f"must be at most {limits.max_logprobs}")
    if body.best_of is not None and body.best_of != (body.n or 1):
        return invalid("best_of", "other than n is not supported by this server")
    for prompt in body.prompt:
        if not prompt:
            return invalid("prompt", "must not be empty")
        if isinstance(prompt, list) and (error := check_ids("prompt", prompt, card)):
            return error
    return _check_sampling(body, limits, card)


def check_ids(param: str, token_ids: list[int], card: ModelCard) -> ApiError | None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        stray = next(i for i in token_ids if not 0 <= i < card.vocab_size)
        return invalid(
            param, f"has token id {stray}, which is not in [0, {card.vocab_size}) of the vocabulary"
        )
    return None


def _check_sampling(body: SamplingFields, limits: Limits, card: ModelCard) -> ApiError | None:
    if (body.n or 1) > limits.max_n:
        return invalid("n", f"must be at most {limits.max_n}, not {body.n}")
    if body.stream_options is not None and not body.stream:
        return invalid("stream_options", "needs stream: true")
    return (
        check_ids("logit_bias", list(body.logit_bias or ()), card)
        or check_ids("stop_token_ids", body.stop_token_ids or [], card)
        or _check_stop(body, limits)
    )


def _check_stop(body: SamplingFields, limits: Limits) -> ApiError | None:
    stop = body.stop or []
    if len(stop) > limits.max_stop_strings:
        return invalid("stop", f"must have at most {limits.max_stop_strings} strings")
    if not all(stop):
        return invalid("stop", "must not have an empty string")
    if any(len(text) > limits.max_stop_length for text in stop):
        return invalid("stop", f"must have strings of at most {limits.max_stop_length} characters")
    if len(body.stop_token_ids or ()) > limits.max_logit_bias:
        return invalid("stop_token_ids", f"must have at most {limits.max_logit_bias} ids")
    return None


def check_window(param: str, prompt_tokens: int, card: ModelCard) -> ApiError | None:
    """A prompt must leave room for at least one token."""
    if prompt_tokens < card.max_model_len:
        return None
    return too_long(
        f"{param}: {prompt_tokens} tokens, and the model's window of "
        f"{card.max_model_len} tokens must also hold the answer; shorten {param}",
        param,
    )


def chat_sampling(
    body: ChatRequest, prompt_tokens: int, card: ModelCard
) -> SamplingParams | ApiError:
    """How one choice is drawn; the answer may fill the window unless told otherwise."""
    wanted = body.max_completion_tokens or body.max_tokens
    param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    max_tokens = _max_tokens((param, wanted), prompt_tokens, card.max_model_len, card)
    if isinstance(max_tokens, ApiError):
        return max_tokens
    sampling = _sampling(body, max_tokens)
    if isinstance(sampling, SamplingParams) and body.logprobs:
        return replace(sampling, logprobs=body.top_logprobs or 0)
    return sampling


def completion_sampling(
    body: CompletionRequest, prompt_tokens: int, card: ModelCard
) -> SamplingParams | ApiError:
    wanted = ("max_tokens", body.max_tokens)
    max_tokens = _max_tokens(wanted, prompt_tokens, _COMPLETION_MAX_TOKENS, card)
    if isinstance(max_tokens, ApiError):
        return max_tokens
    sampling = _sampling(body, max_tokens)
    if isinstance(sampling, ApiError):
        return sampling
    return replace(
        sampling,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _max_tokens(
    wanted: tuple[str, int | None], prompt_tokens: int, default: int, card: ModelCard
) -> int | ApiError:
    """A default fits the window; what the client asks for must fit as it is."""
    param, value = wanted
    room = card.max_model_len - prompt_tokens
    if value is None:
        return min(default, room)
    if value <= room:
        return value
    return too_long(
        f"{param} is {value} and the prompt has {prompt_tokens} tokens, together more than the "
        f"model's window of {card.max_model_len} tokens; lower {param} to at most {room}",
        param,
    )


def _sampling(body: SamplingFields, max_tokens: int) -> SamplingParams | ApiError:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        return invalid("min_tokens", f"must be at most {max_tokens}, the most tokens to generate")
    seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed % 2**_SEED_BITS
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 0.0 if body.use_beam_search else 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=body.logit_bias or {},
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def child_seed(seed: int, child: int) -> int:
    """Seed of the ``child``-th choice of a prompt: fixed by the request's seed.

    The first choice has the request's own seed, so that it is what ``n: 1`` gives.
    """
    if child == 0:
        return seed
    data = _SEED_DOMAIN + seed.to_bytes(8, "little") + child.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
