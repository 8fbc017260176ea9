"""Intervals over an ensemble of machines, and what may be said from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa4.errors import ModelError

UNDECIDED = (0.97, 1.03)
"""Nothing is claimed unless the interval of a ratio lies outside: the model does not resolve less."""

_LOW, _HIGH = 0.1, 0.9


@dataclass(frozen=True)
class Interval:
    """Median, and the 10% and 90% quantiles, over an ensemble."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of a value for each machine.

        Raises:
            ModelError: there is none.
        """
        if not len(values):
            raise ModelError("values", 0, "an ensemble has at least one machine", "pass a value for each")
        low, median, high = (float(x) for x in np.quantile(np.asarray(values, float), (_LOW, 0.5, _HIGH)))
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


def ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """A / b, machine by machine.

    Raises:
        ModelError: they are not of one ensemble.
    """
    if len(a) != len(b):
        raise ModelError("ensembles", (len(a), len(b)), "must be the same machines", "replay both on one ensemble")
    return Interval.of([x / y for x, y in zip(a, b, strict=True)])


def verdict(interval: Interval) -> str:
    """What a ratio of speeds says: "faster", "slower" or "undecided"."""
    if interval.low > UNDECIDED[1]:
        return "faster"
    return "slower" if interval.high < UNDECIDED[0] else "undecided"
