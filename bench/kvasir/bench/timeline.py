"""When each output token of a batch of requests came, and the rates that follow. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds from submission (of all requests at once) to each token, for each request."""

    times: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.times or not all(self.times):
            raise ValueError("every request of a timeline has at least one token")

    @property
    def first_token(self) -> float:
        """Seconds until every request had its first token."""
        return max(times[0] for times in self.times)

    def output_rate(self) -> float:
        """Output tokens per second of the whole run: from submission to the last token of all."""
        return sum(map(len, self.times)) / max(times[-1] for times in self.times)

    def decode_rate(self) -> float:
        """Output tokens per second of the whole batch while it was whole: from the moment all
        requests had their first token to the moment the first one ended."""
        start = self.first_token
        end = min(times[-1] for times in self.times)
        if end <= start:
            raise ValueError("the batch was never whole: ask for more output tokens")
        return sum(start < at <= end for times in self.times for at in times) / (end - start)
