"""Rounds one matrix so that its products come out right, rather than its weights. Pure.

Two steps. First the weights are moved towards where their products with the inputs at hand, which
earlier rounding has disturbed, are closest to what is wanted (ridge regression). Then inputs are
rounded one after the other, and the error of each is made up for by those that are still to come:
GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323), with the grids of quantization.py.
"""

import torch
from torch import Tensor

from kvasir.worker.model.quantization import GROUP, quantize_int4

_DAMPING = 0.01
"""Of the mean squared input, added to each one's: GPTQ's own setting."""
_MOVE_DAMPING = 0.1
_MOVE = 0.5
"""The same for the first step, and how much of it is taken. All of it fits the text at hand, and is
worse on others than none (KL 0.055 and 0.050, of half 0.040, with 8,192 tokens of docstrings)."""
_LEVELS = 15
_HALF = _LEVELS // 2
_TRIES = 8


def round_matrix(weight: Tensor, inputs: Tensor, missing: Tensor) -> Tensor:
    """Weights on int4's grid, float32 [outputs, inputs].

    Args:
        weight: float32 [outputs, inputs].
        inputs: float32 [tokens, inputs], what the rounded matrix will be multiplied with.
        missing: float32 [tokens, outputs], by how much the products of ``weight`` and ``inputs``
            fall short of what is wanted.

    Raises:
        ArithmeticError: values that are not finite, or too large for int4's scales.
    """
    hessian = (inputs.T @ inputs).double() / len(inputs)
    wanted = (inputs.T @ missing).double() / len(inputs)
    move = torch.cholesky_solve(wanted, _factor(_damped(hessian, _MOVE_DAMPING)))
    inverse = torch.cholesky_inverse(_factor(_damped(hessian, _DAMPING)))
    moved = weight + _MOVE * move.T.float()
    return settled(_compensated(moved, inverse, hessian.diagonal().float()))


def settled(weight: Tensor) -> Tensor:
    """The nearby weights that int4 keeps bit for bit: for those of ``round_matrix``, the same.

    A group whose values are almost equal beside their size may need another round. ArithmeticError
    if there are none: values that are not finite, or too large.
    """
    for _ in range(_TRIES):
        kept = quantize_int4(weight).dequantized()
        if torch.equal(kept, weight):
            return weight
        weight = kept
    raise ArithmeticError("int4 does not keep its own weights")


def _factor(matrix: Tensor, *, upper: bool = False) -> Tensor:
    """The Cholesky factor."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix, upper=upper)
    if failed:
        raise ArithmeticError("how its inputs depend on each other is beyond float64")
    return factor


def _damped(hessian: Tensor, part: float) -> Tensor:
    added = part * hessian.diagonal().mean().clamp(min=1e-12)
    return hessian + added * torch.eye(len(hessian), dtype=hessian.dtype)


def _compensated(weight: Tensor, inverse: Tensor, importance: Tensor) -> Tensor:
    """``inverse`` is the Hessian's, float64 [inputs, inputs]."""
    factor = _factor(inverse, upper=True).float()
    left = weight.T.contiguous()
    found = torch.empty_like(left)
    for first in range(0, len(left), GROUP):
        group = left[first : first + GROUP]
        end = first + len(group)
        grid = quantize_int4(group.T, importance[first:end])
        scale, minimum = grid.scales[:, 0], grid.minima[:, 0]
        codes, errors = torch.empty_like(group), torch.empty_like(group)
        for place, row in enumerate(group):
            codes[place] = _codes(row, scale.float(), minimum.float())
            value = codes[place] * scale.float() + minimum.float()
            following = factor[first + place, first + place : end]
            errors[place] = (row - value) / following[0]
            group[place + 1 :] -= torch.outer(following[1:], errors[place])
        left[end:] -= factor[first:end, end:].T @ errors
        found[first:end] = _anchored(codes, scale, minimum)
    return found.T.contiguous()


def _codes(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((values - minimum) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, _LEVELS)


def _anchored(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Values of a group [GROUP, outputs], on a grid that quantize_int4 finds again.

    It looks for grids that begin at the least value and have at least 8 steps. A finer scale keeps
    the values; another minimum moves them by its rounding to float16, far less than a step.
    """
    lowest = codes.amin(0)
    codes = codes - lowest
    minimum = (minimum.float() + lowest * scale.float()).half()
    for _ in range(3):
        coarse = codes.amax(0) <= _HALF
        codes = torch.where(coarse, 2 * codes, codes)
        scale = torch.where(coarse, scale / 2, scale)
    return codes * scale.float() + minimum.float()
