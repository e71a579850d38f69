"""Weights in fewer bits: what they are rounded to, and what they then stand for.

int8: one float32 scale for each output, symmetric. int4: one float16 scale and one float16
minimum for each group of 32 inputs, as in GGUF's Q4_1; weights that lie on such a grid already are
kept as they are. Rounding needs the weights alone and gives the same bits on every machine,
so that workers of one quantization may exchange KV.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvasir.worker.model.errors import ModelError

GROUP = 32
"""Inputs that share a scale in int4."""
_LEVELS = 15
"""The greatest int4 code."""
_STEPS = range(_LEVELS, _LEVELS // 2, -1)
"""Steps that a group's range may be cut into: a grid need not be used to its ends."""
_CLIPS = (0.95, 0.9, 0.85, 0.8)
"""Parts of a group's range that are tried: less of it makes the steps finer."""
_ROWS = 2048
"""Rows that are searched at once: as many as keep the search's memory small."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the matrices of a model are rounded to when they are read; norms and biases never are.

    The embedding and the output layer are int8 where the others are int4: they are not on a
    grid of few steps in any checkpoint, and a wrong last bit there is a wrong token. With int8
    activations each token's row is rounded too, by a scale of its own.
    """

    weights: Literal["none", "int8", "int4"] = "none"
    activations: Literal["none", "int8"] = "none"

    @property
    def label(self) -> str:
        """Equal labels of equal checkpoints give equal KV."""
        return self.weights if self.activations == "none" else f"{self.weights}-a8"

    def matrix(self, weight: Tensor, name: str) -> "Weight":
        """A matrix of a layer; a ModelError with its ``name`` if int4 cannot hold it."""
        if self.weights == "int4":
            try:
                return quantize_int4(weight)
            except ArithmeticError as error:
                raise ModelError(
                    "model",
                    f"{name} cannot be rounded to int4 ({error})",
                    "use a checkpoint that is not damaged, or set quantization to int8 or none",
                ) from error
        return quantize_int8(weight) if self.weights == "int8" else weight

    def vocabulary(self, weight: Tensor) -> "Weight":
        """The embedding or the output layer."""
        return weight if self.weights == "none" else quantize_int8(weight)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix [outputs, inputs] as ``values * scales``: int8, and float32 [outputs]."""

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [outputs, inputs] as ``codes * scales + minima``.

    ``codes`` are uint8 in 0..15, [outputs, groups, GROUP], the last group filled with zeros that
    mean nothing; ``scales`` and ``minima`` float16 [outputs, groups].
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor
    inputs: int

    def dequantized(self) -> Tensor:
        """float32 [outputs, inputs]."""
        groups = (
            self.codes.float() * self.scales[..., None].float() + self.minima[..., None].float()
        )
        return groups.flatten(1)[:, : self.inputs]


Weight = Tensor | Int8Weight | Int4Weight
"""A matrix [outputs, inputs], rounded or as it is."""


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Each row's greatest magnitude becomes 127; the error is at most half a scale."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    values = weight / torch.where(scales > 0, scales, 1.0)[:, None]
    return Int8Weight(values.round().clamp(-127, 127).to(torch.int8), scales)


def quantize_int4(weight: Tensor, importance: Tensor | None = None) -> Int4Weight:
    """For each group the grid, of those that are tried, with the least squared error.

    ``importance`` [inputs] weighs the errors; equally, if it is not given. ArithmeticError if a
    group has no grid: values that are not finite, or too large for its float16 numbers.
    """
    _, inputs = weight.shape
    weighed = torch.ones(inputs, device=weight.device) if importance is None else importance.float()
    weighed = pad(weighed, (0, -inputs % GROUP)).view(-1, GROUP)
    parts = [_search(_groups(rows.float()), weighed) for rows in torch.split(weight, _ROWS)]
    codes, scales, minima = (torch.cat(part) for part in zip(*parts, strict=True))
    return Int4Weight(codes, scales, minima, inputs)


def _groups(weight: Tensor) -> Tensor:
    """[outputs, groups, GROUP]; the last group repeats its last input, which alters no range."""
    short = -weight.shape[1] % GROUP
    if short:
        weight = pad(weight[:, None], (0, short), mode="replicate")[:, 0]
    return weight.reshape(len(weight), -1, GROUP)


def _search(groups: Tensor, importance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(-1), groups.amax(-1)
    center, span = (low + high) / 2, high - low
    tried = [(low, span / steps) for steps in _STEPS]
    tried += [(center - span * clip / 2, span * clip / _LEVELS) for clip in _CLIPS]
    best = torch.full_like(low, torch.inf)
    codes = torch.zeros_like(groups, dtype=torch.uint8)
    scales, minima = torch.zeros_like(low, dtype=torch.half), low.half()
    for minimum, scale in ((start.half(), step.half()) for start, step in tried):
        found = _codes(groups, minimum, scale)
        error = ((_values(found, scale, minimum) - groups).square() * importance).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better[..., None], found, codes)
        scales = torch.where(better, scale, scales)
        minima = torch.where(better, minimum, minima)
        if not best.any():
            break
    if not best.isfinite().all():
        raise ArithmeticError("values that are not finite, or too large for float16 scales")
    return codes, scales, minima


def _codes(groups: Tensor, minimum: Tensor, scale: Tensor) -> Tensor:
    divisor = torch.where(scale > 0, scale, 1.0).float()
    steps = (groups - minimum.float()[..., None]) / divisor[..., None]
    return steps.round().clamp(0, _LEVELS).to(torch.uint8)


def _values(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return codes.float() * scales.float()[..., None] + minima.float()[..., None]
