"""One token per row of logits, for a whole batch at once.

The random numbers of a row depend on its seed and output index alone, and every other
step treats rows apart; so a token depends on nothing but its own logits and request.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir.worker.contracts import Sampled, SampleSpec
from kvasir.worker.sampling.adjust import adjust, changes_logits
from kvasir.worker.sampling.logprobs import token_logprobs
from kvasir.worker.sampling.rng import exponentials, stream_keys
from kvasir.worker.sampling.truncate import truncate

NOT_FINITE = "the model computed logits that are not finite"


def sample(logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]) -> list[Sampled]:
    """Draw one token per row.

    Args:
        logits: float32 [rows, vocab], as the model gave them.
        specs: what each row's request wants.
        eos_ids: tokens that end a sequence, banned while a spec has ``forbid_stop``. Some
            token is neither one of them nor a stop token of that spec.

    Raises:
        FloatingPointError: the logits are not numbers; the model is broken.
    """
    # What requests do to finite logits is bounded.
    check_finite(logits)
    adjusted = adjust(logits, specs, eos_ids)
    tokens: list[int] = adjusted.argmax(-1).tolist()
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature > 0]
    if drawn:
        chosen = _draw(_rows(adjusted, drawn), [specs[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return _with_logprobs(logits, specs, tokens)


def is_plainly_greedy(spec: SampleSpec) -> bool:
    """Whether the greatest of the model's own logits is all that a request wants."""
    params = spec.params
    return params.temperature == 0 and params.logprobs is None and not changes_logits(spec)


def check_finite(logits: Tensor) -> None:
    """FloatingPointError if some are not."""
    # The extremes of a tensor with a NaN are NaN.
    if not bool(torch.stack(torch.aminmax(logits)).isfinite().all()):
        raise FloatingPointError(NOT_FINITE)


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """The Gumbel-max trick: each token has noise of its own, and the greatest sum is drawn.

    The last bits of logits differ between batches. Here they matter only when two sums are that
    close; on a cumulative distribution they would move the bounds of every token.
    """
    params = [spec.params for spec in specs]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    # The greatest logit is moved to 0 first: a tiny temperature then overflows to -inf only.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    keys = stream_keys([p.seed for p in params], [spec.index for spec in specs])
    noise = exponentials(torch.from_numpy(keys).to(logits.device), logits.shape[-1])
    tokens: list[int] = (truncate(scaled, params) - noise.log_()).argmax(-1).tolist()
    return tokens


def _with_logprobs(
    logits: Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]
) -> list[Sampled]:
    wanted = [(row, k) for row, spec in enumerate(specs) if (k := spec.params.logprobs) is not None]
    sampled = [Sampled(token_id=token) for token in tokens]
    if wanted:
        rows = [row for row, _ in wanted]
        found = token_logprobs(
            _rows(logits, rows), [tokens[row] for row in rows], [k for _, k in wanted]
        )
        for row, logprobs in zip(rows, found, strict=True):
            sampled[row] = Sampled(token_id=tokens[row], logprobs=logprobs)
    return sampled


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows; no copy where they are all."""
    return logits if len(rows) == len(logits) else logits[rows]
