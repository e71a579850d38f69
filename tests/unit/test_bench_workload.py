"""Arrivals, lengths, prompts and traces."""

import json
import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.bench.arrivals import Process, arrival_times
from kvasir.bench.traces import Replay, TraceRow, read_trace, trace_requests
from kvasir.bench.workload import (
    FIRST_TOKEN_ID,
    Lengths,
    Question,
    Shape,
    TokenSource,
    WorkloadError,
    few_shot,
    question_requests,
    random_requests,
    read_questions,
)

TOKENS = TokenSource("0/0", 5000)


# --- arrivals --------------------------------------------------------------------------------


@given(
    st.sampled_from(["poisson", "constant", "burst"]),
    st.floats(min_value=0.1, max_value=1000),
    st.integers(min_value=1, max_value=100),
    st.integers(),
)
def test_arrivals_start_at_0_in_order_and_repeat_by_seed(
    process: Process, rate: float, count: int, seed: int
) -> None:
    times = arrival_times(process, rate, count, seed)
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)
    assert times == arrival_times(process, rate, count, seed)


@pytest.mark.parametrize("process", ["poisson", "constant", "burst"])
def test_arrivals_have_the_asked_mean_rate(process: Process) -> None:
    times = arrival_times(process, 10.0, 4001, seed=1)
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.05)


def test_poisson_gaps_vary_as_much_as_their_mean() -> None:
    times = arrival_times("poisson", 10.0, 4000, seed=2)
    gaps = [b - a for a, b in pairwise(times)]
    assert pstdev(gaps) == pytest.approx(mean(gaps), rel=0.1)


def test_a_burst_comes_at_one_instant() -> None:
    assert arrival_times("burst", 2.0, 5, seed=0, burst_size=2) == [0.0, 0.0, 1.0, 1.0, 2.0]


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rate must be positive"):
        arrival_times("constant", 0.0, 3, seed=0)


# --- lengths and random prompts --------------------------------------------------------------


@given(
    st.sampled_from(["fixed", "uniform", "lognormal"]),
    st.integers(min_value=1, max_value=5000),
    st.floats(min_value=0.01, max_value=1.0),
)
def test_lengths_are_at_least_one_token(shape: Shape, average: int, width: float) -> None:
    assert min(Lengths(shape, average, width).draw(50, random.Random(0))) >= 1


@pytest.mark.parametrize("shape", ["fixed", "uniform", "lognormal"])
def test_lengths_have_the_asked_mean(shape: Shape) -> None:
    drawn = Lengths(shape, 200, 0.5).draw(5000, random.Random(3))
    assert mean(drawn) == pytest.approx(200, rel=0.03)


def test_lognormal_has_the_asked_deviation_and_a_long_tail() -> None:
    drawn = Lengths("lognormal", 200, 0.5).draw(20_000, random.Random(4))
    assert pstdev(drawn) == pytest.approx(100, rel=0.05)
    assert max(drawn) > 600


def test_random_prompts_have_exact_lengths_and_ids_of_the_vocabulary() -> None:
    specs = random_requests(20, Lengths("uniform", 50), Lengths("fixed", 7), seed=0, tokens=TOKENS)
    for spec in specs:
        assert 25 <= len(spec.prompt.token_ids) <= 75
        assert all(FIRST_TOKEN_ID <= token < 5000 for token in spec.prompt.token_ids)
        assert spec.max_tokens == 7
    assert len({spec.prompt for spec in specs}) == 20


def test_another_run_has_the_same_lengths_and_other_tokens() -> None:
    lengths = Lengths("lognormal", 50)
    first = random_requests(10, lengths, lengths, seed=0, tokens=TokenSource("0/0", 5000))
    second = random_requests(10, lengths, lengths, seed=0, tokens=TokenSource("0/1", 5000))
    assert [len(s.prompt.token_ids) for s in first] == [len(s.prompt.token_ids) for s in second]
    assert not {s.prompt for s in first} & {s.prompt for s in second}


def test_a_vocabulary_without_ordinary_tokens_is_refused() -> None:
    with pytest.raises(WorkloadError, match="vocabulary"):
        TokenSource("0/0", FIRST_TOKEN_ID)


# --- questions -------------------------------------------------------------------------------


def test_worked_examples_come_first_and_are_not_asked() -> None:
    questions = [Question(f"What is {i} plus 1?", str(i + 1)) for i in range(4)]
    specs = question_requests(questions, count=3, max_tokens=9, shots=2)
    shared = few_shot(questions[:2], "")[: -len("Question: \nAnswer:")]
    assert all(spec.prompt.text.startswith(shared) for spec in specs)
    assert [spec.prompt.text.count("What is 2 plus 1?") for spec in specs] == [1, 0, 1]
    assert all(spec.prompt.text.endswith("\nAnswer:") for spec in specs)


def test_more_shots_than_questions_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="leave no question"):
        question_requests([Question("Why?", "So.")], count=1, max_tokens=1, shots=1)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "not JSON"),
        ('{"question": "Why?"}', "answer is missing; each line is a JSON object with question, "),
        ('{"prompt": "Why?"}', "question, answer is missing"),
        ('["a"]', "not a JSON object"),
        ('{"question": 1, "answer": "b"}', "question must be text, not 1"),
        ('{"question": "Why?", "answer": ""}', 'answer must be text, not ""'),
    ],
)
def test_a_bad_question_line_is_named(tmp_path: Path, bad: str, why: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Why?", "answer": "So."}\n\n' + bad + "\n")
    with pytest.raises(WorkloadError, match=rf"questions\.jsonl:3: {why}"):
        read_questions(path)


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    """JSON may hold the line separator of Unicode as it is."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a\u2028b", "answer": "c"}\r\n', encoding="utf-8")
    assert read_questions(path) == [Question("a\u2028b", "c")]


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_file_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not UTF-8 text"):
        read_trace(path)
    with pytest.raises(WorkloadError, match="not UTF-8 text"):
        read_questions(path)


def test_a_file_without_questions_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(WorkloadError, match="no questions"):
        read_questions(path)


# --- traces ----------------------------------------------------------------------------------


def mooncake(**changes: object) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps({**row, **changes}) + "\n"


def test_mooncake_rows_count_from_the_first_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake(timestamp=2000) + "\n" + mooncake(timestamp=3500, hash_ids=[7]))
    assert read_trace(path) == [TraceRow(0.0, 600, 5, (0, 1)), TraceRow(1.5, 600, 5, (7,))]
    assert len(read_trace(path, limit=1)) == 1


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-01-01 23:59:59.5000000,374,44\r\n"
        "2023-01-02 00:00:01.2500000,396,109\r\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 374, 44), TraceRow(1.75, 396, 109)]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("t.jsonl", mooncake() + "{oops}\n", r"t\.jsonl:2: not JSON"),
        ("t.jsonl", mooncake() + '{"timestamp": 1}\n', r"t\.jsonl:2: input_length, .* missing"),
        ("t.jsonl", mooncake(timestamp=None), r"t\.jsonl:1: timestamp, .* must be numbers"),
        ("t.jsonl", mooncake(timestamp=float("nan")), r"t\.jsonl:1: its time must be a finite"),
        ("t.jsonl", mooncake(input_length=float("inf")), r"t\.jsonl:1: .* must be numbers"),
        ("t.jsonl", mooncake(input_length=-1), r"t\.jsonl:1: lengths must not be negative"),
        ("t.jsonl", mooncake(timestamp=5) + mooncake(), r"t\.jsonl:2: earlier than"),
        ("t.jsonl", "", "no requests"),
        ("t.csv", "a,b\n1,2\n", r"t\.csv:1: expected the columns .*found a,b"),
        ("t.csv", "", r"t\.csv:1: .*found none"),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,1,2\nnoon,3,4\n",
            r"t\.csv:3: .*noon",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,many,2\n",
            r"t\.csv:2: .*many",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00\n",
            r"t\.csv:2: ContextTokens, GeneratedTokens is missing",
        ),
        ("t.txt", "x\n", "jsonl .* or .csv"),
    ],
)
def test_a_bad_trace_line_is_named(tmp_path: Path, name: str, lines: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(lines)
    with pytest.raises(WorkloadError, match=message):
        read_trace(path)


ROWS = st.lists(
    st.builds(
        TraceRow,
        at=st.just(0.0),
        input_length=st.integers(min_value=0, max_value=3000),
        output_length=st.integers(min_value=0, max_value=100),
        hash_ids=st.lists(st.integers(min_value=0, max_value=5), max_size=6).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS, st.sampled_from([0.05, 0.1, 0.5, 1.0]))
def test_equal_hash_ids_give_equal_blocks_and_lengths_are_exact(
    rows: list[TraceRow], scale: float
) -> None:
    specs, left_out = trace_requests(rows, Replay(length_scale=scale), TOKENS)
    assert left_out == 0
    block = max(1, round(512 * scale))
    by_hash: dict[int, tuple[int, ...]] = {}
    for row, spec in zip(rows, specs, strict=True):
        ids = spec.prompt.token_ids
        assert len(ids) == max(1, round(row.input_length * scale))
        for position, hash_id in enumerate(row.hash_ids):
            piece = ids[position * block : (position + 1) * block]
            if len(piece) == block:
                assert by_hash.setdefault(hash_id, piece) == piece


def test_what_no_hash_covers_is_the_rows_own() -> None:
    rows = [TraceRow(0.0, 700, 1, (3,)), TraceRow(0.0, 700, 1, (3,))]
    (first, second), _ = trace_requests(rows, Replay(), TOKENS)
    assert first.prompt.token_ids[:512] == second.prompt.token_ids[:512]
    assert first.prompt.token_ids[512:] != second.prompt.token_ids[512:]


def test_too_long_rows_are_left_out_and_counted() -> None:
    rows = [TraceRow(0.0, 100, 10), TraceRow(1.0, 100, 11), TraceRow(3.0, 100, 10)]
    specs, left_out = trace_requests(rows, Replay(speedup=2.0, max_total=110), TOKENS)
    assert [spec.due for spec in specs] == [0.0, 1.5]
    assert left_out == 1
