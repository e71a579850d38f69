"""What a worker tells Prometheus.

Names follow vLLM's where it has one, so that existing dashboards and endpoint pickers work;
the meaning and the unit of each are the same as there. Gauges and counters of the engine
are read from its last ``Load`` at scrape time, never kept twice. All label values come from
the worker's own settings or from closed sets, so the number of series is fixed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvasir.worker.contracts import KvUsage, Load
from kvasir.worker.transfer.check import Outcome

_TTFT = (
    "vllm:time_to_first_token_seconds",
    "Time from the arrival of a request, or of another worker's call for its prefill, at "
    "this worker to its first token.",
    (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
    ),
)
_ITL = (
    "vllm:inter_token_latency_seconds",
    "Time between consecutive outputs of a request.",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
_TRANSFER_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TRANSFER = (
    "kvasir_kv_transfer_seconds",
    "Time from the call of the prefill worker to the end of a received transfer.",
    _TRANSFER_BUCKETS,
)
_HOLDER_QUEUE = (
    "kvasir_kv_transfer_queue_seconds",
    "Time that a received transfer waited for admission at the prefill worker.",
    _TRANSFER_BUCKETS,
)
_HOLDER_COMPUTE = (
    "kvasir_kv_transfer_compute_seconds",
    "Time from there to the first token at the prefill worker.",
    _TRANSFER_BUCKETS,
)
"""Histograms: name, help text, buckets in seconds."""

_GENERATED = (
    "vllm:generation_tokens_total",
    "Tokens that this worker gave to routers.",
    "model_name",
)
_TRANSFERS = (
    "kvasir_kv_transfer_total",
    "KV transfers that this worker received, by how they ended.",
    "outcome",
)
_MOVED = (
    "kvasir_kv_transfer_bytes_total",
    "Payload bytes of KV blocks moved.",
    "direction",
)
"""Counters: name, help text, label."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What ``vllm:cache_config_info`` says."""

    block_size: int
    num_blocks: int
    prefix_caching: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this worker was told to hold; all else in its resident size is the program."""

    weights: int
    kv: int


class WorkerMetrics:
    """All series of one worker, in a registry of their own.

    A transfer is counted once, by its receiver; ``kvasir_kv_transfer_bytes_total`` counts
    payload bytes on each side.
    """

    def __init__(
        self, model_name: str, cache: CacheConfig, memory: Memory, load: Callable[[], Load]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(model_name, cache, load))
        held = Gauge(
            "kvasir_worker_memory_bytes",
            "Memory of the weights, as they are held, and of all KV blocks.",
            ["model_name", "part"],
            registry=self.registry,
        )
        held.labels(model_name, "weights").set(memory.weights)
        held.labels(model_name, "kv").set(memory.kv)
        model = {"model_name": model_name}
        self._ttft = self._histogram(*_TTFT, model)
        self._itl = self._histogram(*_ITL, model)
        self._transfer_seconds = self._histogram(*_TRANSFER)
        self._holder_queue = self._histogram(*_HOLDER_QUEUE)
        self._holder_compute = self._histogram(*_HOLDER_COMPUTE)
        self._generated = self._counter(*_GENERATED).labels(model_name)
        transfers, moved = self._counter(*_TRANSFERS), self._counter(*_MOVED)
        self._transfers = {outcome: transfers.labels(outcome.value) for outcome in Outcome}
        self._sent, self._received = moved.labels("sent"), moved.labels("received")

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        labels: Mapping[str, str] | None = None,
    ) -> Histogram:
        family = Histogram(name, text, labels or (), buckets=buckets, registry=self.registry)
        return family.labels(**labels) if labels else family

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [label], registry=self.registry)

    def first_output(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def prefilled(self, seconds: float) -> None:
        """The first token of a request that another worker decodes, and tells of."""
        self._ttft.observe(seconds)

    def next_output(self, seconds: float) -> None:
        """One output, of however many tokens: more than one with speculation."""
        self._itl.observe(seconds)

    def generated(self, count: int) -> None:
        """Tokens of all choices; of a beam search, those of all hypotheses that it gives."""
        self._generated.inc(count)

    def transfer_ended(self, outcome: Outcome, seconds: float) -> None:
        self._transfers[outcome].inc()
        self._transfer_seconds.observe(seconds)

    def holder_times(self, queue_seconds: float, compute_seconds: float) -> None:
        """As the prefill worker of a complete transfer tells them."""
        self._holder_queue.observe(queue_seconds)
        self._holder_compute.observe(compute_seconds)

    def transfer_sent(self, num_bytes: int) -> None:
        self._sent.inc(num_bytes)

    def transfer_received(self, num_bytes: int) -> None:
        self._received.inc(num_bytes)


_Samples = tuple[tuple[str, str, Callable[[Load], float]], ...]
"""Name, help text, and what it is of a load."""

_GAUGES: _Samples = (
    ("vllm:num_requests_running", "Requests in the current steps.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests waiting for room.", lambda load: load.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "KV blocks in use; 1 is all of them.",
        lambda load: load.kv_blocks_used / max(load.kv_blocks_total, 1),
    ),
    (
        "kvasir_worker_queued_prefill_tokens",
        "Prompt tokens accepted and not yet computed.",
        lambda load: load.queued_prefill_tokens,
    ),
    (
        "kvasir_worker_kv_waste_ratio",
        "Internal and external waste among the KV slots taken out of use.",
        lambda load: load.kv.waste,
    ),
    (
        "kvasir_worker_kv_block_table_entries",
        "Block ids in the block tables of all requests.",
        lambda load: load.kv.table_entries,
    ),
)
_COUNTERS: _Samples = (
    # Each admitted prompt is looked up once, so both counters are the same number here.
    (
        "vllm:prompt_tokens",
        "Prompt tokens of admitted requests, cached ones among them.",
        lambda load: load.prefix_query_tokens,
    ),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda load: load.prefix_query_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda load: load.prefix_hit_tokens,
    ),
    (
        "vllm:num_preemptions",
        "Requests put back to be recomputed.",
        lambda load: load.preemptions,
    ),
    (
        "vllm:spec_decode_num_drafts",
        "How often tokens were drafted for a request.",
        lambda load: load.drafts,
    ),
    (
        "vllm:spec_decode_num_draft_tokens",
        "Drafted tokens.",
        lambda load: load.draft_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were right.",
        lambda load: load.accepted_tokens,
    ),
    (
        "kvasir_worker_prefill_tokens",
        "Tokens that this worker computed for prompts; cached and received ones are not.",
        lambda load: load.prefill_tokens,
    ),
    (
        "kvasir_worker_busy_seconds",
        "Time in which the engine's thread had work.",
        lambda load: load.busy_seconds,
    ),
)


class _EngineCollector(Collector):
    """Turns the engine's last Load into samples."""

    def __init__(self, model_name: str, cache: CacheConfig, load: Callable[[], Load]) -> None:
        self._model_name = model_name
        self._cache = cache
        self._load = load

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        load = self._load()
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, value in table:
                family = kind(name, text, labels=["model_name"])
                family.add_metric([self._model_name], value(load))
                yield family
        yield self._slots(load.kv)
        yield self._cache_info()

    def _slots(self, kv: KvUsage) -> GaugeMetricFamily:
        slots = GaugeMetricFamily(
            "kvasir_worker_kv_slots",
            "Token slots of KV blocks: filled, reserved for known tokens, internal waste (beyond "
            "them) and external waste (free but of no use).",
            labels=["model_name", "state"],
        )
        for state, count in (
            ("filled", kv.filled),
            ("reserved", kv.reserved),
            ("internal_waste", kv.internal),
            ("external_waste", kv.external),
        ):
            slots.add_metric([self._model_name, state], count)
        return slots

    def _cache_info(self) -> GaugeMetricFamily:
        labels = {
            "model_name": self._model_name,
            "block_size": str(self._cache.block_size),
            "num_gpu_blocks": str(self._cache.num_blocks),
            "enable_prefix_caching": str(self._cache.prefix_caching),
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the KV cache.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1)
        return info
