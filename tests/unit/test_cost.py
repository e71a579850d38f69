"""Worker choice: tables for the formula, and small simulations of what peers got wrong."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from kvasir.proto.blocks import block_hashes, cacheable_blocks
from kvasir.router.cost import (
    DECODE_WEIGHTS,
    MAX_DETOUR,
    PREFILL_WEIGHTS,
    Decision,
    Group,
    PrefillWork,
    Role,
    Standing,
    choose,
    disaggregate,
)
from kvasir.router.load import RECENT_HALF_LIFE, WorkerLoad
from kvasir.router.prefix_index import PrefixIndex, Stored

BLOCK = 16


def rng() -> random.Random:
    return random.Random(7)


# --- choice ---------------------------------------------------------------------------------


def test_nobody_to_choose() -> None:
    assert choose({}, {}, 2.0, rng()) is None
    assert choose({"a": 0.0}, {}, 2.0, rng(), exclude={"a"}) is None


@pytest.mark.parametrize(
    ("loads", "cached", "winner"),
    [
        ({"a": 5.0, "b": 4.0}, {}, "b"),
        ({"a": 100.0, "b": 0.0}, {"a": 64}, "a"),
        ({"a": 200.0, "b": 0.0}, {"a": 64}, "b"),
        ({"a": 0.0, "b": 0.0}, {"b": 16, "unknown": 999}, "b"),
    ],
)
def test_lowest_cost_wins(loads: dict[str, float], cached: dict[str, int], winner: str) -> None:
    found = choose(loads, cached, 2.0, rng())
    assert found is not None
    assert found[0] == winner


def test_ties_are_broken_at_random() -> None:
    source = rng()
    wins = Counter(
        found[0]
        for _ in range(400)
        if (found := choose(dict.fromkeys("abcd", 1.0), {}, 2.0, source)) is not None
    )
    assert set(wins) == set("abcd")
    assert min(wins.values()) > 60


def test_excluded_workers_do_not_hide_others() -> None:
    found = choose({"a": 0.0, "b": 9.0}, {}, 2.0, rng(), exclude={"a"})
    assert found == ("b", 9.0)


# --- eligibility ----------------------------------------------------------------------------


def standing(
    role: Role = "both",
    *,
    connected: bool = True,
    silent: bool = False,
    draining: bool = False,
    breaker_open: bool = False,
) -> Standing:
    return Standing(role, connected, silent, draining, breaker_open)


@pytest.mark.parametrize(
    ("worker", "decode", "prefill"),
    [
        (standing("both"), True, False),
        (standing("decode"), True, False),
        (standing("prefill"), False, True),
        (standing("decode", connected=False), False, False),
        (standing("decode", silent=True), False, False),
        (standing("decode", draining=True), False, False),
        (standing("decode", breaker_open=True), False, False),
        (standing("prefill", connected=False), False, False),
        (standing("prefill", silent=True), False, False),
        (standing("prefill", draining=True), False, False),
        (standing("prefill", breaker_open=True), False, False),
    ],
)
def test_eligibility(worker: Standing, decode: bool, prefill: bool) -> None:
    assert (worker.may_decode, worker.may_prefill) == (decode, prefill)


def test_a_replay_needs_the_same_weights_but_not_the_same_revision() -> None:
    old = Group("m", "tok", "weights", "1", 16)
    assert Group("m", "tok", "weights", "2", 32).serves(old)
    assert not Group("m", "tok", "other", "1", 16).serves(old)
    assert not Group("m", "other", "weights", "1", 16).serves(old)


# --- disaggregation -------------------------------------------------------------------------

IDLE_PREFILL = PrefillWork(queued=0, uncached=100)


@pytest.mark.parametrize(
    ("mode", "local", "remote", "decision"),
    [
        ("auto", PrefillWork(0, 64), IDLE_PREFILL, Decision.REMOTE),
        ("auto", PrefillWork(0, 63), IDLE_PREFILL, Decision.LOCAL_CACHED),
        ("auto", PrefillWork(0, 64), None, Decision.LOCAL_NO_WORKER),
        ("auto", PrefillWork(0, 100), PrefillWork(200, 100), Decision.REMOTE),
        ("auto", PrefillWork(0, 100), PrefillWork(201, 100), Decision.LOCAL_QUEUE),
        ("auto", PrefillWork(500, 100), PrefillWork(201, 100), Decision.REMOTE),
        ("always", PrefillWork(0, 1), PrefillWork(9999, 1), Decision.REMOTE),
        ("always", PrefillWork(0, 1), None, Decision.LOCAL_NO_WORKER),
        ("never", PrefillWork(0, 9999), IDLE_PREFILL, Decision.LOCAL_OFF),
    ],
)
def test_disaggregation(
    mode: str, local: PrefillWork, remote: PrefillWork | None, decision: Decision
) -> None:
    assert MAX_DETOUR == 3.0
    assert mode in {"auto", "always", "never"}
    assert disaggregate(mode, 64, local, remote) is decision  # type: ignore[arg-type]  # a str from the table


# --- load -----------------------------------------------------------------------------------


def test_charge_counts_at_once_and_is_not_counted_again_by_a_report() -> None:
    load = WorkerLoad()
    load.charge("r", prefill_tokens=100, kv_tokens=120, new_tokens=100)
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (100, 120)
    load.report(100, 120)  # contains r
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (100, 120)
    load.computed("r")
    load.report(0, 121)
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (0, 121)
    load.release("r")
    load.report(0, 0)
    assert (load.queued_prefill_tokens, load.active_kv_tokens, load.in_flight) == (0, 0, 0)


def test_a_report_that_crossed_the_request_does_not_make_it_vanish() -> None:
    load = WorkerLoad()
    load.charge("r", prefill_tokens=100, kv_tokens=120, new_tokens=100)
    load.report(0, 0)  # left the worker before r arrived there
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (100, 120)


def test_other_routers_work_adds_to_what_was_sent_since() -> None:
    load = WorkerLoad()
    load.report(1000, 5000)
    load.charge("r", prefill_tokens=100, kv_tokens=120, new_tokens=100)
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (1100, 5120)
    load.report(900, 5120)
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (900, 5120)


def test_release_before_any_report_takes_everything_back() -> None:
    load = WorkerLoad()
    load.report(10, 20)
    load.charge("r", prefill_tokens=100, kv_tokens=120, new_tokens=0)
    load.release("r")
    load.release("r")
    assert (load.queued_prefill_tokens, load.active_kv_tokens) == (10, 20)


def test_charging_twice_is_a_bug() -> None:
    load = WorkerLoad()
    load.charge("r", prefill_tokens=1, kv_tokens=1, new_tokens=1)
    with pytest.raises(ValueError, match="already charged"):
        load.charge("r", prefill_tokens=1, kv_tokens=1, new_tokens=1)


def test_recent_work_fades() -> None:
    load = WorkerLoad()
    load.charge("r", prefill_tokens=0, kv_tokens=0, new_tokens=100)
    before = load.cost(PREFILL_WEIGHTS)
    load.decay(RECENT_HALF_LIFE)
    assert load.cost(PREFILL_WEIGHTS) == pytest.approx(before / 2)


# --- simulations ----------------------------------------------------------------------------


class Simulation:
    """Workers with unbounded caches; a request holds its load until it is finished."""

    def __init__(self, workers: int, seed: int) -> None:
        self.names = [f"w{i}" for i in range(workers)]
        self.rng = random.Random(seed)
        self.index = PrefixIndex(1 << 24, lambda: 0.0)
        self.loads = {name: WorkerLoad() for name in self.names}
        self.caches: dict[str, set[bytes]] = {name: set() for name in self.names}
        self.sequence = Counter[str]()
        self.served = Counter[str]()
        self.hits = 0
        self.tokens = 0
        self.running: list[tuple[str, str, list[bytes]]] = []
        for name in self.names:
            self.index.reset_worker(name)

    def start(self, prompt: list[int], exclude: Iterable[str] = ()) -> str:
        chain = block_hashes(prompt, BLOCK)[: cacheable_blocks(len(prompt), BLOCK)]
        cached = {w: n * BLOCK for w, n in self.index.match(chain).items()}
        loads = {w: load.cost(DECODE_WEIGHTS) for w, load in self.loads.items() if w not in exclude}
        found = choose(loads, cached, DECODE_WEIGHTS.uncached, self.rng)
        assert found is not None
        worker = found[0]
        uncached = len(prompt) - cached.get(worker, 0)
        request = f"r{sum(self.served.values())}"
        self.loads[worker].charge(
            request, prefill_tokens=uncached, kv_tokens=len(prompt), new_tokens=uncached
        )
        self.index.speculate(worker, chain)
        self.served[worker] += 1
        # Requests of one worker are computed in order, so a block asked for earlier is a hit.
        depth = 0
        while depth < len(chain) and chain[depth] in self.caches[worker]:
            depth += 1
        self.caches[worker].update(chain)
        self.hits += depth * BLOCK
        self.tokens += len(prompt)
        self.running.append((worker, request, chain))
        return worker

    def finish_oldest(self) -> None:
        worker, request, chain = self.running.pop(0)
        self.loads[worker].computed(request)
        self.sequence[worker] += 1
        self.index.apply(worker, self.sequence[worker], [Stored(chain)])
        self.loads[worker].release(request)
        self.loads[worker].report(0, 0)

    def run(self, prompts: list[list[int]], concurrency: int) -> None:
        for prompt in prompts:
            if len(self.running) >= concurrency:
                self.finish_oldest()
            self.start(prompt)
        while self.running:
            self.finish_oldest()

    @property
    def imbalance(self) -> float:
        return max(self.served.values()) * len(self.names) / sum(self.served.values())

    @property
    def hit_rate(self) -> float:
        return self.hits / self.tokens


def grouped_prompts(groups: int, each: int, prefix: int, suffix: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    prefixes = [[source.randrange(49_000) for _ in range(prefix)] for _ in range(groups)]
    prompts = [
        [*prefixes[g], *(source.randrange(49_000) for _ in range(suffix))]
        for g in range(groups)
        for _ in range(each)
    ]
    source.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("concurrency", [1, 4, 8, 16, 40])
@pytest.mark.parametrize("prefix", [256, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_prefix_groups_share_and_spread(seed: int, prefix: int, concurrency: int) -> None:
    prompts = grouped_prompts(groups=8, each=5, prefix=prefix, suffix=30, seed=seed)
    shared = Simulation(workers=1, seed=seed)
    shared.run(prompts, concurrency)
    spread = Simulation(workers=4, seed=seed)
    spread.run(prompts, concurrency)
    assert spread.hit_rate > shared.hit_rate - 0.05
    assert spread.imbalance < 1.5


@pytest.mark.parametrize("common", [0, 16, 32])
@pytest.mark.parametrize("seed", range(5))
def test_unique_prompts_one_after_the_other_use_every_idle_worker(seed: int, common: int) -> None:
    """A common chat template must not tie all of them to the first worker."""
    source = random.Random(seed)
    sim = Simulation(workers=4, seed=seed)
    head = list(range(common))
    sim.run([head + [source.randrange(49_000) for _ in range(100)] for _ in range(12)], 1)
    assert set(sim.served) == set(sim.names)
    assert sim.imbalance < 1.5


@pytest.mark.parametrize("seed", range(3))
def test_one_hot_prefix_does_not_pile_up(seed: int) -> None:
    prompts = grouped_prompts(groups=1, each=400, prefix=512, suffix=48, seed=seed)
    shared = Simulation(workers=1, seed=seed)
    shared.run(prompts, 64)
    sim = Simulation(workers=4, seed=seed)
    sim.run(prompts, 64)
    assert sim.imbalance < 1.5
    assert sim.hit_rate > shared.hit_rate - 0.05


def test_identical_concurrent_prompts_go_together() -> None:
    sim = Simulation(workers=4, seed=1)
    prompt = [i % 1000 for i in range(512)]
    first = sim.start(prompt)
    assert [sim.start(prompt) for _ in range(4)] == [first] * 4


def test_one_long_prefill_sends_the_next_ones_elsewhere() -> None:
    sim = Simulation(workers=4, seed=1)
    busy = sim.start(list(range(4000)))
    others = {sim.start([9000 + 100 * i + j for j in range(64)]) for i in range(12)}
    assert busy not in others
    assert len(others) == 3


def test_a_dead_worker_is_not_an_idle_worker() -> None:
    """It leaves the choice altogether, rather than count as load 0."""
    sim = Simulation(workers=4, seed=1)
    for i in range(12):
        assert sim.start([1000 * i + j for j in range(100)], exclude={"w0"}) != "w0"
    assert min(sim.served[w] for w in ("w1", "w2", "w3")) >= 3
