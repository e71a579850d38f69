"""The benches that switch one mechanism at a time: what they offer, and what they make of it."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from helpers.fake_runner import FakeRunner
from kvasir.bench import batching, chunking, prefix
from kvasir.bench.chunking_command import Counts, draw
from kvasir.bench.cli import bench
from kvasir.bench.disaggregation import layouts
from kvasir.bench.stats import Record, Spread
from kvasir.bench.trial import TrialError, in_turns, paired_ratios, trial
from kvasir.bench.workload import Lengths, Prompt, RequestSpec, TokenSource
from kvasir.worker.limits import SchedulerConfig

VOCABULARY = 5000
BLOCKS = 64
CONFIG = SchedulerConfig(num_blocks=BLOCKS, block_size=4, max_model_len=64)


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batching, chunking, prefix):
        monkeypatch.setattr(module, "memory_bandwidth", lambda: 12.5)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(num_blocks=BLOCKS, block_size=4)


def spec(first: int, max_tokens: int, length: int = 5) -> RequestSpec:
    return RequestSpec(Prompt(tuple(range(first, first + length))), max_tokens)


# --- trial -----------------------------------------------------------------------------------


def test_every_request_has_its_own_length_and_is_timed(runner: FakeRunner) -> None:
    with trial(runner, CONFIG) as running:
        records = running.run([spec(10, 3), spec(20, 7)])
    assert [record.output_tokens for record in records] == [3, 7]
    for record in records:
        assert record.ok
        assert record.sent <= record.token_times[0] <= record.end == record.token_times[-1]


def test_a_static_batch_is_done_before_the_next_one_comes(runner: FakeRunner) -> None:
    with trial(runner, CONFIG) as running:
        records = running.run([spec(10 * i, 2 + i) for i in range(5)], batch=2)
    ends = [max(r.end for r in records[first : first + 2]) for first in (0, 2)]
    assert min(r.sent for r in records[2:4]) >= ends[0]
    assert records[4].sent >= ends[1]


def test_a_trial_may_use_fewer_blocks_than_the_runner_has(runner: FakeRunner) -> None:
    few = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=64)
    with trial(runner, few) as running:
        assert running.run([spec(10, 8)])[0].ok
        with pytest.raises(TrialError, match="has 8"):
            running.submit(spec(10, 60 - 5))


def test_an_aborted_request_is_no_success(runner: FakeRunner) -> None:
    with trial(runner, CONFIG) as running:
        request = running.submit(spec(10, 50))
        running.wait_first_token([request])
        running.abort(request)
        (record,) = running.wait([request])
    assert record.failure in ("aborted", None)
    assert record.failure == "aborted" or record.output_tokens == 50


def test_ratios_pair_the_values_of_one_run() -> None:
    ratios = paired_ratios({"a": [1.0, 2.0, 4.0], "b": [2.0, 6.0, 16.0]}, "a")
    assert ratios["a"] == Spread(1.0, 1.0, 1.0)
    assert ratios["b"] == Spread(3.0, 2.0, 4.0)


def test_who_goes_first_changes() -> None:
    assert in_turns(["a", "b"], 0) == ["a", "b"]
    assert in_turns(["a", "b"], 1) == ["b", "a"]


# --- batching --------------------------------------------------------------------------------

WORK = batching.Workload(
    requests=20,
    inputs=Lengths("fixed", 8),
    outputs=(("same", Lengths("fixed", 10)), ("differing", Lengths("lognormal", 10, 1.5))),
    reserved_slots=2,
    max_running=6,
    seed=0,
)


def test_four_modes_on_each_distribution(runner: FakeRunner) -> None:
    figures = batching.measure(runner, CONFIG, WORK, 2, VOCABULARY, lambda _: None)
    names = {mode.name for mode in batching.MODES}
    assert [f.outputs for f in figures] == ["same"] * 4 + ["differing"] * 4
    assert {f.mode for f in figures[:4]} == {f.mode for f in figures[4:]} == names
    for figure in figures:
        assert figure.failed == 0
        assert [s.requests for s in figure.summaries] == [20, 20]
        if figure.mode == batching.BASELINE:
            assert figure.ratio == Spread(1.0, 1.0, 1.0)


def test_reservation_bounds_the_batch_and_paging_fills_it() -> None:
    """32 blocks: two sequences of full length (64 tokens), or six of 18 tokens."""
    for mode, widest in (("continuous, reserved", 2), ("continuous, paged", 6)):
        runner = FakeRunner(num_blocks=BLOCKS, block_size=4)
        (chosen,) = [m for m in batching.MODES if m.name == mode]
        work_config = batching._bounded(CONFIG, WORK, BLOCKS)
        assert work_config.num_blocks == 32
        specs = [spec(100 * i, 10, length=8) for i in range(20)]
        batching._offer(runner, work_config, chosen, specs, WORK)
        assert max(len(step) for step in runner.steps) == widest


def test_more_slots_than_memory_is_an_error(runner: FakeRunner) -> None:
    small = FakeRunner(num_blocks=31, block_size=4)
    with pytest.raises(ValueError, match="2 slots need 32 blocks; there are 31"):
        batching.measure(small, CONFIG, WORK, 1, VOCABULARY, lambda _: None)


def test_outputs_that_are_cut_are_counted() -> None:
    lengths = Lengths("lognormal", 10, 1.5)
    tokens = TokenSource("0", VOCABULARY)
    whole = [spec.max_tokens for spec in batching._requests(WORK, lengths, 10_000, tokens)]
    cut = [spec.max_tokens for spec in batching._requests(WORK, lengths, 20, tokens)]
    differing = sum(a != b for a, b in zip(whole, cut, strict=True))
    assert 0 < differing < WORK.requests
    assert batching.cut_outputs(WORK, lengths, 20) == differing
    assert batching.cut_outputs(WORK, lengths, 10_000) == 0


@pytest.mark.parametrize("input_len", ["64", "50", "1000"])
def test_prompts_that_leave_no_room_for_outputs_are_refused(input_len: str) -> None:
    lengths = ("--input-len", input_len, "--output-len", "20", "--max-model-len", "64")
    result = CliRunner().invoke(bench, ["batching", *lengths])
    assert result.exit_code == 2
    assert "--input-len" in result.output
    assert "--max-model-len 64" in " ".join(result.output.split())


def test_mean_of_the_batch_over_time() -> None:
    long = Record(due=0, sent=0, end=10, token_times=(0.0, 10.0))
    short = Record(due=0, sent=0, end=5, token_times=(0.0, 5.0))
    assert batching.mean_running([long, short]) == 1.5


# --- chunking --------------------------------------------------------------------------------


def test_a_budget_bounds_every_step_and_prompts_come_one_at_a_time() -> None:
    runner = FakeRunner(num_blocks=2200, block_size=4)
    config = SchedulerConfig(num_blocks=2200, block_size=4, max_model_len=4000)
    work = chunking.Workload(budgets=(8, 32), decoding=2, prompts=3, input_len=24, seed=0)
    figures = chunking.measure(runner, config, work, 1, VOCABULARY, lambda _: None)
    assert [figure.budget for figure in figures] == [8, 32]
    assert max(sum(step.values()) for step in runner.steps) <= 32
    for figure in figures:
        assert len(figure.runs[0].ttfts) == 3
        assert figure.ttft_p50.median > 0
    steps_of_a_prompt = [step for step in runner.steps if max(step.values()) > 8]
    assert steps_of_a_prompt, "the larger budget computes more than 8 tokens of a prompt at once"


def test_sequences_that_end_too_early_are_an_error(runner: FakeRunner) -> None:
    work = chunking.Workload(budgets=(8,), decoding=2, prompts=30, input_len=40, seed=0)
    with pytest.raises(TrialError, match="ask for fewer prompts"):
        chunking.measure(runner, CONFIG, work, 1, VOCABULARY, lambda _: None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("64,x", "write whole numbers"), ("0,4", "at least 1"), ("4,4", "twice")],
)
def test_bad_budgets_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(click.BadParameter, match=complaint):
        Counts().convert(text, None, None)


@pytest.mark.parametrize("name", ["picture.txt", "picture"])
def test_a_picture_that_is_no_png_is_refused_beforehand(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(bench, ["chunking", "--png", str(tmp_path / name)])
    assert result.exit_code == 2
    assert f"{name} must end in .png" in result.output


def test_the_picture_is_a_png(runner: FakeRunner, tmp_path: Path) -> None:
    one = Spread(0.2, 0.1, 0.3)
    figures = [
        chunking.Figure(budget, *(one,) * 7, runs=(), memory_gb_s=()) for budget in (64, 256)
    ]
    draw(figures, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n")


# --- prefix ----------------------------------------------------------------------------------

SHARING = prefix.Workload(
    requests=4, input_len=32, output_len=4, shares=(0.0, 0.5), shared_requests=3, seed=0
)


def test_hit_rates_are_those_of_the_shared_part(runner: FakeRunner) -> None:
    gains = prefix.measure_gain(runner, CONFIG, SHARING, 2, VOCABULARY, lambda _: None)
    assert [gain.hit_rate.median for gain in gains] == [0.0, 0.5]
    for gain in gains:
        assert gain.ttft["on"].median > 0
        assert gain.ratio.median == pytest.approx(
            gain.ttft["off"].median / gain.ttft["on"].median, rel=1.0
        )


def test_the_cost_is_measured_without_a_single_hit(runner: FakeRunner) -> None:
    cost = prefix.measure_cost(runner, CONFIG, SHARING, 2, VOCABULARY, lambda _: None)
    assert cost.whole.low > 0
    assert set(cost.tokens_per_s) == {"on", "off"}
    assert len(cost.memory_gb_s) == 2


def test_the_scheduler_alone_serves_everything() -> None:
    specs = [spec(100 * i, 4, length=20) for i in range(3)]
    assert prefix.scheduler_seconds_per_token(CONFIG, specs) > 0


# --- disaggregation --------------------------------------------------------------------------


def test_all_layouts_have_the_same_threads_and_one_splits() -> None:
    found = layouts(4)
    assert {sum(threads for _, threads in layout.workers) for layout in found} == {4}
    assert [layout.splits for layout in found] == [False, False, True]
