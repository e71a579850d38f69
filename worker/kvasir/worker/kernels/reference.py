"""What each kernel computes, in plain torch: float64 inside, rounded once at the end.

For tests alone; a kernel rounds more often, so results are close, not equal.
"""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times weight [outputs, inputs] transposed: float32 [rows, outputs]."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).float()


def rounded_rows(x: Tensor) -> Tensor:
    """Each row as multiples, 127 at most, of a 127th of its greatest magnitude: float64.

    The steps are found in float32, since which of two is nearer decides more than its last bits.
    """
    values = x.float()
    scale = values.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (values * inverse).round().double() * scale.double()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Zhang and Sennrich 2019, over the last dimension: bfloat16."""
    exact = x.double()
    scale = (exact.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (exact * scale * weight.double()).bfloat16()


def rotate(
    heads: Tensor, weight: Tensor | None, epsilon: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Heads [rows, head_dim], normalized if there is a weight, turned by [rows, head_dim / 2]."""
    exact = heads.double()
    if weight is not None:
        scale = (exact.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        exact = exact * scale * weight.double()
    low, high = exact.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).bfloat16()


def attend(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Causal attention of new tokens at positions ``start`` and up.

    Args:
        queries: [count, kv_heads, group, head_dim].
        keys, values: [start + count, kv_heads, head_dim].

    Returns:
        float64 [count, kv_heads, group, head_dim].
    """
    count = len(queries)
    scores = torch.einsum("qhgd,khd->hgqk", queries.double(), keys.double())
    scores = scores / queries.shape[-1] ** 0.5
    seen = torch.arange(len(keys)) <= start + torch.arange(count)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values.double())
