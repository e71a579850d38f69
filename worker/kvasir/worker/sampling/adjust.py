"""What a request does to its logits before temperature: penalties, bias, forbidden ends.

Order: repetition penalty (Keskar et al. 2019), then presence and frequency penalties, then
logit_bias, then the ban of end and stop tokens while ``forbid_stop`` holds. Repetition
counts prompt and output, presence and frequency output only. Only the entries of the
[rows, vocab] logits that change are touched; all but the banned ones stay finite.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvasir.worker.contracts import SampleSpec

_Entries = tuple[list[int], list[int], list[float]]
"""Rows, token ids and amounts."""


def changes_logits(spec: SampleSpec) -> bool:
    params = spec.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or spec.forbid_stop
    )


def adjust(logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]) -> Tensor:
    """Adjusted copy of finite logits [rows, vocab]; the same tensor if no spec asks for a change.

    Banned entries are -inf, all others finite.
    """
    if not any(changes_logits(spec) for spec in specs):
        return logits
    adjusted = logits.clone()
    _apply(adjusted, _repetition(specs), _repel)
    _apply(adjusted, _penalties(specs), _lower)
    _apply(adjusted, _biases(specs), _raise)
    _apply(adjusted, _bans(specs, eos_ids), torch.add)
    return adjusted


def _apply(logits: Tensor, entries: _Entries, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace ``logits[row, id]`` by ``change(logits[row, id], amount)`` for each entry."""
    rows, ids, amounts = entries
    if not rows:
        return
    where = (
        torch.tensor(rows, device=logits.device),
        torch.tensor(ids, device=logits.device),
    )
    amount = torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
    logits[where] = change(logits[where], amount)


def _repel(values: Tensor, penalty: Tensor) -> Tensor:
    return _finite(torch.where(values > 0, values / penalty, values * penalty))


def _lower(values: Tensor, penalty: Tensor) -> Tensor:
    return _finite(values - penalty)


def _raise(values: Tensor, bias: Tensor) -> Tensor:
    return _finite(values + bias)


def _finite(values: Tensor) -> Tensor:
    """What has overflowed becomes the greatest finite value of its sign."""
    limits = torch.finfo(values.dtype)
    return values.clamp(limits.min, limits.max)


def _repetition(specs: Sequence[SampleSpec]) -> _Entries:
    entries: _Entries = ([], [], [])
    for row, spec in enumerate(specs):
        if spec.params.repetition_penalty != 1.0:
            seen = sorted({*spec.prompt_ids, *spec.output_ids})
            _extend(entries, row, seen, [spec.params.repetition_penalty] * len(seen))
    return entries


def _penalties(specs: Sequence[SampleSpec]) -> _Entries:
    entries: _Entries = ([], [], [])
    for row, spec in enumerate(specs):
        presence, frequency = spec.params.presence_penalty, spec.params.frequency_penalty
        if presence or frequency:
            counts = Counter(spec.output_ids)
            amounts = [presence + frequency * count for count in counts.values()]
            _extend(entries, row, list(counts), amounts)
    return entries


def _biases(specs: Sequence[SampleSpec]) -> _Entries:
    entries: _Entries = ([], [], [])
    for row, spec in enumerate(specs):
        bias = spec.params.logit_bias
        _extend(entries, row, list(bias), list(bias.values()))
    return entries


def _bans(specs: Sequence[SampleSpec], eos_ids: frozenset[int]) -> _Entries:
    entries: _Entries = ([], [], [])
    for row, spec in enumerate(specs):
        if spec.forbid_stop:
            ends = sorted(eos_ids | spec.params.stop_token_ids)
            _extend(entries, row, ends, [float("-inf")] * len(ends))
    return entries


def _extend(entries: _Entries, row: int, ids: list[int], amounts: list[float]) -> None:
    entries[0].extend([row] * len(ids))
    entries[1].extend(ids)
    entries[2].extend(amounts)
