"""Steps with drafts: what they may use, what is kept of them, and when they stop."""

from itertools import pairwise

import pytest

from helpers.engine_workload import BLOCK_SIZE, EOS, Bench, make_request
from helpers.fake_runner import expected_tokens
from kvasir.proto.blocks import block_hashes
from kvasir.worker.contracts import Chunk, Finish, StepPlan, Work
from kvasir.worker.speculation.config import Method, SpeculationConfig

ALWAYS = SpeculationConfig(Method.DRAFT, 6, adaptive=False)
NGRAMS = SpeculationConfig(Method.NGRAM, 6, adaptive=False)


def drafts(plan: StepPlan) -> list[int]:
    return [chunk.num_to_draft or len(chunk.draft_ids) for chunk in plan.chunks]


def test_several_tokens_come_out_of_one_step_and_equal_those_of_single_steps() -> None:
    bench = Bench(num_blocks=32, speculation=ALWAYS)
    request = make_request("a", range(6), 40, logprobs=1)
    bench.scheduler.add(request)
    steps = bench.run()
    assert steps < 25
    assert bench.tokens("a") == expected_tokens(request, eos_token_ids=EOS, vocab_size=50)
    load = bench.scheduler.load()
    assert load.drafts < steps
    assert load.accepted_tokens == 40 - len(bench.outputs["a"])
    assert all(len(one.logprobs) == len(one.token_ids) for one in bench.outputs["a"])


def test_ngram_drafts_are_in_the_chunk_with_a_spec_for_each() -> None:
    bench = Bench(num_blocks=32, speculation=NGRAMS, vocab_size=1)
    bench.scheduler.add(make_request("a", [0] * 5, 20, min_tokens=3, ignore_eos=False))
    bench.step()
    (chunk,) = bench.step().chunks
    assert chunk.token_ids == (0,) * 7
    assert chunk.draft_ids == (0,) * 6
    assert [spec.index for spec in chunk.samples] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(spec.output_ids) for spec in chunk.samples[1:]] == [2, 3, 4, 5, 6, 7]
    assert [spec.forbid_stop for spec in chunk.samples] == [True, True, *[False] * 5]
    assert bench.outputs["a"][-1].token_ids == (0,) * 7


def test_no_more_is_drafted_than_can_be_told() -> None:
    bench = Bench(num_blocks=32, speculation=ALWAYS)
    bench.scheduler.add(make_request("a", range(6), 4))
    bench.scheduler.add(make_request("p", range(6), 4, work=Work.PREFILL))
    assert drafts(bench.step()) == [0, 0]
    assert drafts(bench.step()) == [2], "three tokens are left to draw"
    bench.run()
    assert len(bench.tokens("a")) == 4
    assert bench.outputs["a"][-1].finish is Finish.LENGTH


def test_drafts_take_what_is_left_of_the_budget() -> None:
    bench = Bench(num_blocks=64, speculation=ALWAYS, max_batched_tokens=10)
    for name in "ab":
        bench.scheduler.add(make_request(name, range(3), 20))
    bench.step()
    assert drafts(bench.step()) == [6, 2]
    bench.scheduler.add(make_request("c", range(20, 27), 2))
    plan = bench.step()
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [1, 1, 7], "prompts come first"
    assert sum(drafts(plan)) == 1


def test_drafts_leave_a_block_for_everyone_who_grows() -> None:
    bench = Bench(num_blocks=4, speculation=ALWAYS)
    bench.scheduler.add(make_request("a", range(6), 11))
    bench.step()
    # Seven tokens and six drafts want two more blocks; one of the two that are free must stay.
    assert drafts(bench.step()) == [3 * BLOCK_SIZE - 7]
    bench.run()
    assert bench.scheduler.load().preemptions == 0


def test_only_kept_tokens_are_shared() -> None:
    bench = Bench(num_blocks=32, speculation=ALWAYS)
    bench.scheduler.add(make_request("a", range(6), 30))
    bench.run()
    known = [*range(6), *bench.tokens("a")]
    assert set(bench.scheduler.cached_hashes()) == set(block_hashes(known[:-1], BLOCK_SIZE))


def test_a_stop_token_among_accepted_drafts_ends_the_answer() -> None:
    for stop in range(50):
        bench = Bench(num_blocks=32, speculation=ALWAYS)
        stops = frozenset({stop})
        request = make_request("a", range(6), 30, stop_token_ids=stops, ignore_eos=False)
        bench.scheduler.add(request)
        bench.run()
        assert bench.tokens("a") == expected_tokens(request, 50, EOS)


def test_preempted_sequences_lose_no_accepted_token() -> None:
    bench = Bench(num_blocks=7, speculation=ALWAYS)
    requests = [make_request(str(i), range(10 * i, 10 * i + 5), 16) for i in range(3)]
    for request in requests:
        bench.scheduler.add(request)
    bench.run()
    assert bench.scheduler.load().preemptions > 0
    assert bench.scheduler.load().accepted_tokens > 0
    for request in requests:
        assert bench.tokens(request.request_id) == expected_tokens(request, 50, EOS)


@pytest.mark.parametrize(("batch", "least", "most"), [(1, 1.0, 6.0), (32, 0.0, 0.1)])
def test_a_large_batch_turns_itself_off(batch: int, least: float, most: float) -> None:
    """Half of the drafts are right; a step costs as much as nine rows more than it has."""
    bench = Bench(
        num_blocks=2000,
        vocab_size=2,
        speculation=SpeculationConfig(Method.NGRAM, 6),
        max_running_requests=batch,
    )
    for i in range(batch):
        bench.scheduler.add(make_request(str(i), [i % 2] * 4, 200, seed=i, temperature=1.0))
    bench.run()
    drafted = bench.scheduler.load().draft_tokens / (200 * batch)
    assert least <= drafted <= most


def test_a_draft_model_is_tried_again_among_short_requests() -> None:
    """Each begins with a step that has nobody to draft for, and ends before a hundred steps."""
    bench = Bench(
        num_blocks=2000, speculation=SpeculationConfig(Method.DRAFT, 6), max_running_requests=1
    )
    drafted = []
    for i in range(12):
        bench.scheduler.add(make_request(str(i), [i] * 4, 20, seed=i, temperature=1.0))
        bench.run()
        drafted.append(bench.scheduler.load().drafts)
    assert drafted[0] == 0, "before it is measured a draft pass seems too dear"
    assert drafted[-1] > 0


def test_what_does_not_pay_is_tried_once_in_a_hundred_steps() -> None:
    """Draft passes are too dear for any other reason; about half of the drafts are right."""
    bench = Bench(
        num_blocks=2000,
        vocab_size=2,
        speculation=SpeculationConfig(Method.DRAFT, 6),
        pass_seconds=100.0,
    )
    bench.scheduler.add(make_request("a", [0] * 4, 900, seed=0, temperature=1.0))
    drafted = []
    while bench.scheduler.request_ids():
        drafted.append(sum(drafts(bench.step())))
    tried = [step for step, count in enumerate(drafted) if count]
    assert len(tried) > 5
    assert all(following >= step + 100 for step, following in pairwise([0, *tried]))


def test_a_chunk_that_draws_no_token_takes_no_drafts() -> None:
    with pytest.raises(ValueError, match="unpack"):
        Chunk("a", (1,), 0, (0,)).with_drafts((2,))
