"""Logprobs of tokens under the model's own distribution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir.proto.sampling import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: Sequence[int]
) -> list[TokenLogprobs]:
    """Logprob, rank and alternatives of one token per row.

    Args:
        logits: float32 [rows, vocab], as the model gave them.
        token_ids: the token of each row.
        top: how many of the most likely tokens to list for each row.
    """
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(1, ids)
    ranks = (logits > own).sum(-1) + 1
    values = logprobs.gather(1, ids)[:, 0].tolist()
    best, best_ids = logprobs.topk(min(max(top), logits.shape[-1]), dim=-1)
    rows = zip(values, ranks.tolist(), best_ids.tolist(), best.tolist(), top, strict=True)
    return [
        TokenLogprobs(value, rank, tuple(zip(alternatives[:k], theirs[:k], strict=True)))
        for value, rank, alternatives, theirs, k in rows
    ]
