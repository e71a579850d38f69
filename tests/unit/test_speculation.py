"""N-gram drafts, acceptance, the cost line and the controller: each by itself."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.worker.speculation.acceptance import (
    Acceptance,
    OwnAcceptance,
    num_accepted,
    num_trials,
)
from kvasir.worker.speculation.config import Method, SpeculationConfig
from kvasir.worker.speculation.controller import Candidate, allot, telling
from kvasir.worker.speculation.costs import Cost, StepCosts
from kvasir.worker.speculation.ngram import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, NgramIndex


def by_search(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """What NgramIndex.propose says it does, by looking at every place."""
    places = [
        place
        for place in range(len(tokens) - 1, MIN_MATCH - 1, -1)
        if tokens[place - MIN_MATCH : place] == tokens[len(tokens) - MIN_MATCH :]
    ][:MAX_CANDIDATES]

    def agreement(place: int) -> int:
        lengths = range(1, min(MAX_MATCH, place) + 1)
        return max(n for n in lengths if tokens[place - n : place] == tokens[len(tokens) - n :])

    if not places:
        return ()
    best = max(places, key=lambda place: (agreement(place), place))
    drafts: list[int] = []
    for i in range(count):
        at = best + i
        drafts.append(tokens[at] if at < len(tokens) else drafts[i - (len(tokens) - best)])
    return tuple(drafts)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=6),
    st.integers(1, 12),
)
def test_proposals_are_those_of_a_search(parts: list[list[int]], count: int) -> None:
    index, tokens = NgramIndex(), []
    for part in parts:
        index.extend(part)
        tokens += part
        assert len(index) == len(tokens)
        assert index.propose(count) == by_search(tokens, count)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([], ()),
        ([5], ()),
        ([5, 6, 7, 8], ()),
        ([1, 2, 3, 4, 5, 9, 1, 2], (3, 4, 5)),
        ([1, 2, 3, 0, 1, 2, 4, 0, 1, 2], (4, 0, 1)),  # the latest of equals
        ([9, 1, 2, 3, 0, 8, 1, 2, 4, 0, 9, 1, 2], (3, 0, 8)),  # but the longest first
        ([7, 7, 7], (7, 7, 7)),  # goes on with the period
        ([1, 2, 1, 2, 1], (2, 1, 2)),
    ],
)
def test_proposals(tokens: list[int], drafts: tuple[int, ...]) -> None:
    index = NgramIndex()
    index.extend(tokens)
    assert index.propose(3) == drafts


@pytest.mark.parametrize(
    ("drafts", "drawn", "accepted", "trials"),
    [
        ((), (5,), 0, 0),
        ((5,), (5, 6), 1, 1),
        ((4,), (5, 6), 0, 1),
        ((5, 6, 7), (5, 6, 7, 8), 3, 3),
        ((5, 9, 7), (5, 6, 7, 8), 1, 2),
        ((9, 6, 7), (5, 6, 7, 8), 0, 1),
    ],
)
def test_the_accepted_prefix(
    drafts: tuple[int, ...], drawn: tuple[int, ...], accepted: int, trials: int
) -> None:
    assert num_accepted(drafts, drawn) == accepted
    assert num_trials(len(drafts), accepted) == trials


def test_acceptance_follows_its_sequence_and_starts_from_all_of_them() -> None:
    overall = Acceptance()
    one = OwnAcceptance(overall)
    for _ in range(200):
        one.observe(4, 4)
    assert one.probability > 0.99
    assert overall.probability > 0.99
    two = OwnAcceptance(overall)
    assert two.probability == overall.probability
    for _ in range(10):
        two.observe(1, 0)
    assert two.probability < 0.25
    assert one.probability > 0.99
    assert 0.75 < overall.probability < 0.9, "all sequences change slower than one"


# --- costs -----------------------------------------------------------------------------------


def test_costs_become_those_of_the_machine() -> None:
    rng = random.Random(1)
    costs = StepCosts()
    for _ in range(300):
        rows = rng.choice([1, 1, 1, 5, 9])
        costs.observe(rows, 0, (0.006 + 0.0004 * rows) * rng.uniform(0.95, 1.05))
    cost = costs.cost()
    assert cost.base == pytest.approx(0.006, rel=0.1)
    assert cost.per_row == pytest.approx(0.0004, rel=0.3)


def test_costs_of_a_constant_batch_keep_the_slope_and_follow_the_speed() -> None:
    costs = StepCosts()
    for rows in (1, 8) * 100:
        costs.observe(rows, 0, 0.01 + 0.001 * rows)
    for seconds in (0.018, 0.036):
        for _ in range(300):
            costs.observe(8, 0, seconds)
    assert costs.cost().per_row == pytest.approx(0.001, rel=0.5)
    assert costs.cost().step(8) == pytest.approx(0.036, rel=0.01)


def test_an_interruption_hardly_counts() -> None:
    costs = StepCosts()
    for rows in (1, 5) * 50:
        costs.observe(rows, 0, 0.01 + 0.001 * rows)
    before = costs.cost().step(1)
    costs.observe(1, 0, 30.0)
    assert costs.cost().step(1) < 1.2 * before


def test_a_draft_pass_is_what_is_left_over() -> None:
    costs = StepCosts(pass_cost=0.5)
    costs.observe(1, 0, 0.010)
    assert costs.cost().per_pass == pytest.approx(0.005)
    for _ in range(200):
        costs.observe(1, 0, 0.010)
        costs.observe(5, 4, costs.cost().step(5) + 4 * 0.003)
    assert costs.cost().per_pass == pytest.approx(0.003, rel=0.01)


def test_before_anything_is_measured_a_row_is_cheap() -> None:
    assert StepCosts().cost().per_row < 0.1 * StepCosts().cost().step(1)


# --- the controller --------------------------------------------------------------------------

MEMORY_BOUND = Cost(base=6.0, per_row=0.2)
COMPUTE_BOUND = Cost(base=6.0, per_row=0.8)
DRAFT_MODEL = Cost(base=6.0, per_row=0.2, per_pass=3.0)


@pytest.mark.parametrize(
    ("batch", "acceptance", "cost", "drafts_each"),
    [
        # Alone, and the weights cost far more than a row: all that can be had.
        (1, 0.9, MEMORY_BOUND, 4),
        (1, 0.5, MEMORY_BOUND, 4),
        # The second of two unlikely tokens has a chance of 4 %, and a row costs 3 % of a step.
        (1, 0.2, MEMORY_BOUND, 2),
        (1, 0.02, MEMORY_BOUND, 0),
        # A row's time is worth 0.52 tokens at batch 32.
        (32, 0.9, MEMORY_BOUND, 3),
        (32, 0.5, MEMORY_BOUND, 0),
        # And 0.81 where rows are dear.
        (32, 0.9, COMPUTE_BOUND, 1),
        (32, 0.8, COMPUTE_BOUND, 0),
        # A draft model must win its own time back as well.
        (1, 0.9, DRAFT_MODEL, 3),
        (1, 0.5, DRAFT_MODEL, 0),
        (8, 0.9, DRAFT_MODEL, 2),
        (32, 0.6, DRAFT_MODEL, 0),
    ],
)
def test_drafts_by_batch_acceptance_and_cost(
    batch: int, acceptance: float, cost: Cost, drafts_each: int
) -> None:
    counts = allot([Candidate(4, acceptance)] * batch, batch, batch, cost, budget=1000)
    assert counts == [drafts_each] * batch


@pytest.mark.parametrize(
    ("acceptance", "count"), [(0.0, 1), (0.05, 1), (0.5, 1), (0.6, 2), (0.8, 4), (1.0, 8)]
)
def test_a_trial_goes_on_as_long_as_it_rather_tells_something(
    acceptance: float, count: int
) -> None:
    assert telling(Candidate(8, acceptance)) == count


def test_each_sequence_is_judged_by_itself() -> None:
    candidates = [Candidate(4, 0.95), Candidate(4, 0.1), Candidate(2, 0.95)]
    assert allot(candidates, 32, 32, MEMORY_BOUND, 1000) == [4, 0, 2]


def test_the_likeliest_drafts_get_a_small_budget() -> None:
    candidates = [Candidate(4, 0.5), Candidate(4, 0.9)]
    assert allot(candidates, 2, 2, MEMORY_BOUND, 3) == [1, 2]
    assert allot(candidates, 2, 2, MEMORY_BOUND, 0) == [0, 0]
    assert allot([], 2, 2, MEMORY_BOUND, 3) == []


def test_a_step_that_prefills_makes_drafts_cheap() -> None:
    assert allot([Candidate(4, 0.3)], 1, 1, COMPUTE_BOUND, 100) == [1]
    assert allot([Candidate(4, 0.3)], 1, 500, COMPUTE_BOUND, 100) == [4]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=4),
    st.floats(0.1, 10),
    st.floats(0.01, 3),
)
def test_no_draft_is_to_be_had_that_would_be_better(
    given_candidates: list[tuple[int, float]], base: float, per_row: float
) -> None:
    candidates = [Candidate(most, chance) for most, chance in given_candidates]
    batch = len(candidates)
    cost = Cost(base, per_row)

    def rate(counts: Sequence[int]) -> float:
        tokens = batch + sum(
            candidate.acceptance ** (i + 1)
            for candidate, count in zip(candidates, counts, strict=True)
            for i in range(count)
        )
        return tokens / cost.step(batch + sum(counts))

    counts = allot(candidates, batch, batch, cost, 100)
    chosen = rate(counts)
    assert chosen >= rate([0] * batch) * (1 - 1e-9)
    for index, candidate in enumerate(candidates):
        if counts[index] < candidate.most:
            more = [count + (i == index) for i, count in enumerate(counts)]
            assert chosen >= rate(more) * (1 - 1e-9)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        SpeculationConfig(Method.NGRAM, 0)
