"""Which tokens may be drawn: top-k, then top-p of what is left, then min-p.

Each cut is a least logit that is kept, so tokens with equal logits stay or go together and
no sort order decides. Fan et al. 2018 (top-k), Holtzman et al. 2019 (top-p),
Nguyen et al. 2024 (min-p).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir.proto.sampling import SamplingParams

_USUAL_WIDTH = 1024
"""How many of the most likely tokens are sorted at first; nearly always enough for top-p."""


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [rows, vocab], after temperature, with what may not be drawn at -inf."""
    least = _least_kept(logits, params)
    if all(p.min_p == 0.0 for p in params):
        return logits if least is None else _cut(logits, least)
    top = logits.amax(-1)
    by_min_p = top + torch.tensor([p.min_p for p in params], device=logits.device).log()
    return _cut(logits, by_min_p if least is None else torch.maximum(least, by_min_p))


def _cut(logits: Tensor, least: Tensor) -> Tensor:
    return logits.masked_fill(logits < least[:, None], float("-inf"))


def _least_kept(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Least logit that top-k and top-p keep, [rows]; None if no row has either."""
    vocab = logits.shape[-1]
    top_k = [min(p.top_k, vocab) if p.top_k else vocab for p in params]
    active = [row for row, p in enumerate(params) if top_k[row] < vocab or p.top_p < 1.0]
    if not active:
        return None
    least = logits.new_full((len(params),), float("-inf"))
    width = min(vocab, max(_USUAL_WIDTH, *(k for k in top_k if k < vocab), 0))
    while active:
        pending = torch.tensor(active, device=logits.device)
        kept, found = _search(
            logits[pending],
            [top_k[row] for row in active],
            [params[r].top_p for r in active],
            width,
        )
        least[pending] = torch.where(found, kept, least[pending])
        active = [row for row, done in zip(active, found.tolist(), strict=True) if not done]
        width = vocab
    return least


def _search(
    logits: Tensor, top_k: list[int], top_p: list[float], width: int
) -> tuple[Tensor, Tensor]:
    """Look for each row's least kept logit among its ``width`` greatest.

    Returns:
        The logit and whether it was found, each [rows]; with the whole vocabulary as
        width it always is.
    """
    vocab = logits.shape[-1]
    greatest = logits.topk(width, dim=-1).values
    weights = (greatest.double() - greatest[:, :1].double()).exp()
    sums = weights.cumsum(-1)
    limits = torch.tensor(top_k, device=logits.device)
    total = sums.gather(1, limits.clamp(max=width)[:, None] - 1)[:, 0]
    unlimited = [row for row, k in enumerate(top_k) if k > width]
    if unlimited:
        rows = torch.tensor(unlimited, device=logits.device)
        total[rows] = _total(logits[rows])
    target = total * torch.tensor(top_p, dtype=torch.float64, device=logits.device)
    count = torch.searchsorted(sums, target[:, None])[:, 0] + 1
    whole = torch.tensor([p >= 1.0 for p in top_p], device=logits.device)
    count = torch.minimum(torch.where(whole, limits, count), limits)
    found = count <= width
    if width == vocab:
        # Rounding can leave the last sum a hair below its target.
        found = torch.ones_like(found)
    kept = greatest.gather(1, count.clamp(max=width)[:, None] - 1)[:, 0]
    return kept, found


def _total(logits: Tensor) -> Tensor:
    """Sum of exp(logit - greatest) per row, added in token-id order: float64 [rows]."""
    shifted = logits.double() - logits.amax(-1, keepdim=True).double()
    return shifted.exp().cumsum(-1)[:, -1]
