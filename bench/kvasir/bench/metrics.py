"""Prometheus text, read into something that can be asked for a sum."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of one scrape, as (name, labels, value)."""

    rows: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum over every sample of that exact name whose labels include the given ones; 0
        where there is none."""
        return sum(
            value
            for sample, have, value in self.rows
            if sample == name and labels.items() <= have.items()
        )


def parse_metrics(text: str) -> Samples:
    """Read the Prometheus exposition format."""
    rows = [
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    return Samples(tuple(rows))
