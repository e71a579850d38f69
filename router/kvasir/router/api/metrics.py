"""Metrics of the HTTP side. Label values come from the route table, HTTP and closed sets."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvasir.router.api.responses import Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """Counts requests by route and status; a client that left counts as 499."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kvasir_router_http_requests",
            "Requests answered.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvasir_router_http_request_seconds",
            "Time from the request's head to the response's end.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_token = Histogram(
            "kvasir_router_http_time_to_first_token_seconds",
            "Time from the validated request to the first token, for each choice.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "kvasir_router_http_requests_in_flight",
            "Requests being answered now.",
            registry=registry,
        )
        self._tokens = Counter(
            "kvasir_router_http_tokens",
            "Tokens of answered requests: of prompts, of them from a cache, and generated.",
            ["kind"],
            registry=registry,
        )
        self._generations = Counter(
            "kvasir_router_generations_total",
            "Generations by outcome: finish reason, refusal reason (internal: also a defect of "
            "the router), or client_gone.",
            ["outcome"],
            registry=registry,
        )

    def request_done(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def generation_ended(self, outcome: str) -> None:
        """``outcome``: a finish reason, a refusal's reason, internal or client_gone."""
        self._generations.labels(outcome).inc()

    def tokens(self, usage: Usage) -> None:
        self._tokens.labels("prompt").inc(usage["prompt_tokens"])
        self._tokens.labels("cached").inc(usage["prompt_tokens_details"]["cached_tokens"])
        self._tokens.labels("generated").inc(usage["completion_tokens"])
