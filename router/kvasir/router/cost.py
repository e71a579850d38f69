"""Which worker serves a request, and whether another one computes its prompt. Pure.

The unit of cost is the time in which a worker computes one prompt token:

    cost(w) = uncached_weight x uncached prompt tokens on w
            + queued prefill tokens of w                     (they are computed first)
            + active_weight x active KV tokens of w          (they slow every step down)
            + recent_weight x KV tokens new to w of late     (see below)

The lowest cost wins, ties are broken at random. The prompt's length is the same for all
workers, so the first term is compared as a saving: -uncached_weight x cached tokens.

``uncached_weight`` is above 1 so that equal prefixes go together: the second prompt waits
for the first one's prefill (weight 1) rather than have it computed again elsewhere.
The last term spreads what idle workers are asked one after the other: without it, the
worker that holds the first block of a common chat template would win each time. It also
makes a hot prefix move on to a second worker, and spares caches that are being churned.

Must not: do I/O, look at a clock, know gRPC.
"""

import random
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class Weights:
    """How a load counts in one kind of choice; in prompt tokens for each token."""

    uncached: float
    active: float
    recent: float


DECODE_WEIGHTS = Weights(uncached=4.0, active=0.02, recent=0.5)
"""For the worker that decodes and, unless another one is asked, computes the prompt.

Found with the simulations of tests/unit/test_cost.py: the lowest ``uncached`` that keeps the
hit rate of grouped prompts within 5 points of one shared cache at every concurrency."""

PREFILL_WEIGHTS = Weights(uncached=2.0, active=0.0, recent=0.5)
"""For the worker that computes prompts only. Its queue is all that a request waits for, and
what it holds costs it nothing."""

MAX_DETOUR = 3.0
"""A prefill worker is used while its queue and this prompt take it at most this many times as
long as the decode worker itself would need: the detour keeps decode steps short, which
is worth waiting for, but not without end."""


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that are interchangeable for a prompt: one model, one rollout revision."""

    model: str
    tokenizer_hash: str
    fingerprint: str
    """Identity of the weights and their numeric form: equal means equal tokens."""
    revision: str
    block_size: int

    def serves(self, other: "Group") -> bool:
        """Whether tokens that ``other`` began may be continued here."""
        return (self.model, self.tokenizer_hash, self.fingerprint) == (
            other.model,
            other.tokenizer_hash,
            other.fingerprint,
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """All that decides whether a worker may be chosen at all."""

    role: Role
    connected: bool
    """Its session is open."""
    silent: bool
    """Nothing was heard of it for suspiciously long."""
    draining: bool
    breaker_open: bool

    @property
    def available(self) -> bool:
        return self.connected and not (self.silent or self.draining or self.breaker_open)

    @property
    def may_decode(self) -> bool:
        return self.available and self.role != "prefill"

    @property
    def may_prefill(self) -> bool:
        """Prefill for others: a worker of role "both" serves whole requests alone."""
        return self.available and self.role == "prefill"


def choose(
    loads: Mapping[str, float],
    cached_tokens: Mapping[str, int],
    uncached_weight: float,
    rng: random.Random,
    exclude: Container[str] = (),
) -> tuple[str, float] | None:
    """The worker with the lowest cost.

    Args:
        loads: eligible worker -> cost of its load, as ``WorkerLoad.cost`` gives it.
        cached_tokens: worker -> leading prompt tokens in its cache; absent: none.
        uncached_weight: tokens of cost for one uncached token.
        rng: breaks ties.
        exclude: workers not to take.

    Returns:
        The worker and its cost less the part that is the same for all, or None if no
        worker is left. Costs of several calls for one prompt are comparable.
    """
    best = float("inf")
    ties: list[str] = []
    for worker, load in loads.items():
        cost = load - uncached_weight * cached_tokens.get(worker, 0)
        if cost > best or worker in exclude:
            continue
        if cost < best:
            best = cost
            ties.clear()
        ties.append(worker)
    return (rng.choice(ties), best) if ties else None


class Decision(Enum):
    """Where a prompt is computed, and why; the label of a metric."""

    REMOTE = "remote"
    LOCAL_OFF = "local_off"
    """Mode "never", or a request that a prefill worker cannot, or is not to, serve."""
    LOCAL_CACHED = "local_cached"
    """Too little is uncached on the decode worker."""
    LOCAL_NO_WORKER = "local_no_worker"
    LOCAL_QUEUE = "local_queue"
    """The prefill worker's queue is too long."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What stands between a worker and the end of this prompt: both in tokens."""

    queued: float
    uncached: int

    @property
    def total(self) -> float:
        return self.queued + self.uncached


def disaggregate(
    mode: Literal["auto", "always", "never"],
    min_uncached_tokens: int,
    local: PrefillWork,
    remote: PrefillWork | None,
) -> Decision:
    """Whether the prompt is computed on the prefill worker that was found best.

    Args:
        mode: as in the settings; "always" asks only that there is a prefill worker.
        min_uncached_tokens: in mode "auto", the least worth a transfer.
        local: the work if the decode worker computes the prompt itself.
        remote: the work on the prefill worker; None if there is none in the revision.
    """
    if mode == "never":
        return Decision.LOCAL_OFF
    if mode == "auto" and local.uncached < min_uncached_tokens:
        return Decision.LOCAL_CACHED
    if remote is None:
        return Decision.LOCAL_NO_WORKER
    if mode == "auto" and remote.total > MAX_DETOUR * local.total:
        return Decision.LOCAL_QUEUE
    return Decision.REMOTE
