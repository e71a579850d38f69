"""What a step costs, learned from the clock. Pure.

    seconds = base + per_row * rows + per_pass * passes

A row is a token that is computed; a pass is one run of the draft model over all sequences that
draft. ``base`` is what a step costs however small it is: on most machines the reading of
all weights. The line is fitted to the latest steps by least squares with exponential
forgetting, so it is that of the present batch size and of the machine's present speed.
"""

from dataclasses import dataclass

_WEIGHT = 0.03
"""Of a new step: about the last 30 count."""
_STIFFNESS = 0.25
"""Variance of rows, in rows squared, at which a measured slope counts half against the old one."""
_ROWS_OF_BASE = 20.0
"""Before anything is measured, a step is taken to cost as much as this many more rows."""
_OUTLIER = 3.0
"""A step longer than this many times the expected one was interrupted; it counts no more."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients of the line, in any one unit of time."""

    base: float
    per_row: float
    per_pass: float = 0.0

    def step(self, rows: int, passes: int = 0) -> float:
        return self.base + self.per_row * rows + self.per_pass * passes


class StepCosts:
    """``pass_cost``: first guess at ``per_pass``, in steps of one row."""

    def __init__(self, pass_cost: float = 0.0) -> None:
        self._pass_cost = pass_cost
        self._rows = self._seconds = 0.0  # means
        self._variance = self._covariance = 0.0
        self._per_row = 1.0
        self._per_pass: float | None = None

    def cost(self) -> Cost:
        base = self._base()
        per_pass = self._per_pass
        if per_pass is None:
            per_pass = self._pass_cost * (base + self._per_row)
        return Cost(base, self._per_row, per_pass)

    def observe(self, rows: int, passes: int, seconds: float) -> None:
        """A step of this many rows, all of them output, took this long."""
        if seconds <= 0:
            return
        if not self._seconds:
            self._rows, self._seconds = rows, seconds
            self._per_row = seconds / (rows + _ROWS_OF_BASE)
        elif passes:
            self._observe_passes(rows, passes, seconds)
        else:
            self._observe_rows(rows, min(seconds, _OUTLIER * self.cost().step(rows)))

    def _observe_rows(self, rows: int, seconds: float) -> None:
        row_change, second_change = rows - self._rows, seconds - self._seconds
        self._rows += _WEIGHT * row_change
        self._seconds += _WEIGHT * second_change
        keep = 1 - _WEIGHT
        self._variance = keep * (self._variance + _WEIGHT * row_change**2)
        self._covariance = keep * (self._covariance + _WEIGHT * row_change * second_change)
        slope = (self._covariance + _STIFFNESS * self._per_row) / (self._variance + _STIFFNESS)
        # No row is free, and not all of the mean step is rows.
        most = self._seconds / max(self._rows, 1.0)
        self._per_row = min(max(slope, 0.0), most)

    def _observe_passes(self, rows: int, passes: int, seconds: float) -> None:
        cost = self.cost()
        seconds = min(seconds, _OUTLIER * cost.step(rows, passes))
        per_pass = max(0.0, (seconds - cost.step(rows)) / passes)
        self._per_pass = cost.per_pass + _WEIGHT * (per_pass - cost.per_pass)

    def _base(self) -> float:
        if not self._seconds:
            return _ROWS_OF_BASE * self._per_row
        return self._seconds - self._per_row * self._rows
