"""The engine bench: what it asks of an engine, how it compares several, and who takes part."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.fake_runner import FakeRunner
from helpers.rivals import install
from kvasir.bench import engine as engine_module
from kvasir.bench import engine_command, engine_contenders
from kvasir.bench.cli import bench
from kvasir.bench.engine import ROWS, Contender, Figure, RequestsFailedError, measure_rows, warm_up
from kvasir.bench.engine_contenders import FORMS, KvasirEngine, Wanted, lineup, most_stored_type
from kvasir.bench.rival import RIVALS
from kvasir.bench.timeline import Timeline
from kvasir.bench.trial import trial
from kvasir.worker.config import WorkerConfig
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.model.source import locate


class Paced:
    """Takes ``pace`` seconds for each token of its own made-up time, prompts all alike.

    Its answers with a number in ``fails`` are two failed requests instead.
    """

    def __init__(self, pace: float, fails: Sequence[int] = ()) -> None:
        self.pace = pace
        self.asked: list[tuple[tuple[tuple[int, ...], ...], int]] = []
        self._fails = fails

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        self.asked.append((tuple(map(tuple, prompts)), max_tokens))
        if len(self.asked) - 1 in self._fails:
            raise RequestsFailedError(["timeout", "http 500"])
        times = tuple(self.pace * (i + 1) for i in range(max_tokens))
        return Timeline((times,) * len(prompts))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between measurements, and a memory probe that costs nothing."""
    monkeypatch.setattr(engine_module, "_SETTLE_S", 0.0)
    monkeypatch.setattr(engine_module, "memory_bandwidth", lambda: 12.5)


def measure(*contenders: Contender, rows: Sequence[str] = tuple(ROWS), runs: int) -> list[Figure]:
    return measure_rows(contenders, [ROWS[key] for key in rows], runs, 0, 5000, lambda _: None)


@pytest.mark.usefixtures("quick")
def test_rows_units_and_ratios() -> None:
    ours = Contender("ours", Paced(0.1), against=("theirs",))
    theirs = Contender("theirs", Paced(0.2))
    figures = measure(ours, theirs, runs=3)
    values = {figure.key: figure.values["ours"] for figure in figures}
    expected = {
        "decode-1": 10.0,
        "decode-16": 160.0,
        "decode-64": 640.0,
        "run-16": 160.0,
        "run-64": 640.0,
        "prefill": 10240.0,
        "cached": 100.0,
    }
    assert list(values) == list(ROWS)
    for key, wanted in expected.items():
        assert values[key] == pytest.approx([wanted] * 3)
    for figure in figures:
        assert figure.ratios["ours"]["theirs"].median == pytest.approx(2.0), "twice as fast"
        assert not figure.ratios["theirs"]
        assert figure.memory_gb_s["ours"] == [12.5] * 3


@pytest.mark.usefixtures("quick")
def test_all_engines_get_the_same_work_and_no_prompt_comes_twice() -> None:
    engines = [Paced(0.1), Paced(0.1), Paced(0.1)]
    contenders = [Contender(str(i), engine) for i, engine in enumerate(engines)]
    warm_up(contenders, list(ROWS.values()), 0, 5000, lambda _: None)
    measure(*contenders, runs=2)
    assert engines[0].asked == engines[1].asked == engines[2].asked
    prompts = [prompt for batch, _ in engines[0].asked for prompt in batch]
    assert len(set(prompts)) == len(prompts)
    warm, cached, *_ = (prompt for prompt in prompts if len(prompt) == 1024 + 16)
    assert warm[:1024] == cached[:1024]


@pytest.mark.usefixtures("quick")
def test_only_wanted_rows_are_asked_for_and_one_answer_gives_two_of_them() -> None:
    whole, part = Paced(0.1), Paced(0.1)
    figures = measure(
        Contender("whole", whole),
        Contender("part", part, against=("whole",), rows=frozenset({"run-16"})),
        rows=("decode-16", "run-16", "prefill"),
        runs=2,
    )
    assert [(len(prompts), outputs) for prompts, outputs in whole.asked] == [(16, 128), (1, 1)] * 2
    assert [(len(prompts), outputs) for prompts, outputs in part.asked] == [(16, 128)] * 2
    found = {figure.key: figure for figure in figures}
    assert list(found) == ["decode-16", "run-16", "prefill"]
    assert list(found["decode-16"].values) == ["whole"]
    assert found["run-16"].ratios["part"]["whole"].median == pytest.approx(1.0)
    assert found["decode-16"].ratios == {"whole": {}}


@pytest.mark.usefixtures("quick")
def test_failed_requests_are_counted_and_their_run_is_no_part_of_a_ratio() -> None:
    ours = Contender("ours", Paced(0.1, fails=[1]), against=("theirs", "never"))
    theirs, never = Contender("theirs", Paced(0.2)), Contender("never", Paced(1, fails=range(9)))
    (figure,) = measure(ours, theirs, never, rows=("run-16",), runs=3)
    assert figure.failed == {"ours": 2, "theirs": 0, "never": 6}
    assert [len(values) for values in figure.values.values()] == [2, 3, 0]
    assert len(figure.memory_gb_s["ours"]) == 2
    assert list(figure.ratios["ours"]) == ["theirs"]
    assert figure.ratios["ours"]["theirs"].median == pytest.approx(2.0)


def test_the_whole_run_lasts_from_submission_to_the_last_token() -> None:
    assert Timeline(((1.0, 2.0), (1.5, 3.0, 4.0))).output_rate() == pytest.approx(5 / 4)


@pytest.fixture
def running() -> Iterator[KvasirEngine]:
    runner = FakeRunner(num_blocks=40, block_size=4)
    settings = SchedulerConfig(num_blocks=40, block_size=4, max_model_len=64)
    with trial(runner, settings) as engine:
        yield KvasirEngine(engine)


def test_our_engine_gives_a_time_for_each_token(running: KvasirEngine) -> None:
    timeline = running.generate([[1, 2, 3], [4, 5, 6, 7, 8]], max_tokens=6)
    assert [len(times) for times in timeline.times] == [6, 6]
    for times in timeline.times:
        assert times[0] > 0
        assert list(times) == sorted(times)


def test_a_refused_prompt_is_an_error(running: KvasirEngine) -> None:
    with pytest.raises(RuntimeError, match="limited to 64"):
        running.generate([[1] * 100], max_tokens=1)


# --- who takes part --------------------------------------------------------------------------


def answering(home: Path, *, version: str = "9.9") -> None:
    """An installed rival that answers each token after half a second of made-up time."""
    script = f"""
import json, sys
settings = json.loads(sys.argv[2])
print(json.dumps({{"ready": True, "version": "{version} " + settings["dtype"]}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    times = [0.5 * (i + 1) for i in range(work["max_tokens"])]
    print(json.dumps({{"times": [times] * len(work["prompts"])}}), flush=True)
"""
    install(home, script)
    (home / ".installed").touch()


def dying(home: Path, *, after: int) -> None:
    """An installed rival that answers ``after`` times, then dies."""
    script = f"""
import json, sys
print(json.dumps({{"ready": True, "version": "9.9"}}), flush=True)
for _ in range({after}):
    work = json.loads(sys.stdin.readline())
    times = [0.5 * (i + 1) for i in range(work["max_tokens"])]
    print(json.dumps({{"times": [times] * len(work["prompts"])}}), flush=True)
sys.stdin.readline()
sys.exit("out of memory")
"""
    install(home, script)
    (home / ".installed").touch()


def wanted(rivals: Path, **changes: Any) -> Wanted:
    given: dict[str, Any] = {
        "config": WorkerConfig(worker_id="bench", threads=1),
        "forms": ("full", "int8"),
        "against": RIVALS,
        "rivals": rivals,
        "rival_limit_s": 60.0,
        "cache": rivals,
        "through_router": False,
    }
    return Wanted(**{**given, **changes})


@pytest.fixture
def without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms of our engine that compute nothing, and no conversion for vLLM."""

    @contextmanager
    def fake(config: WorkerConfig, _say: object) -> Iterator[Any]:
        layout = type("Layout", (), {"dtype": "bfloat16"})
        yield Paced(0.1), type("Loaded", (), {"layout": layout, "vocab_size": 5000})

    monkeypatch.setattr(engine_contenders, "kvasir_engine", fake)
    monkeypatch.setattr(engine_contenders, "huggingface_folder", lambda _url, cache: cache)


@pytest.mark.usefixtures("without_models")
def test_each_form_meets_each_rival_and_quantized_ones_meet_quantized_ones(tmp_path: Path) -> None:
    answering(tmp_path / "vllm-cpu")
    answering(tmp_path / "llama-cpp")
    with lineup(wanted(tmp_path), lambda _: None) as found:
        against = {c.name: c.against for c in found.contenders}
        assert against == {
            "kvasir bfloat16": ("vllm-cpu", "llama-cpp"),
            "kvasir int8": ("vllm-cpu", "llama-cpp", "llama-cpp Q4_1"),
            "vllm-cpu": (),
            "llama-cpp": (),
            "llama-cpp Q4_1": (),
        }
        assert found.versions == {
            "vllm-cpu": "9.9 bfloat16",
            "llama-cpp": "9.9 bfloat16",
            "llama-cpp Q4_1": "9.9 stored",
        }
        assert not found.absent
        assert found.contenders[-1].engine.generate([[1]], 2).times == ((0.5, 1.0),)


@pytest.mark.usefixtures("without_models")
def test_without_a_quantized_form_there_is_no_quantized_rival(tmp_path: Path) -> None:
    answering(tmp_path / "llama-cpp")
    with lineup(wanted(tmp_path, forms=("full",)), lambda _: None) as found:
        assert [c.name for c in found.contenders] == ["kvasir bfloat16", "llama-cpp"]
        assert list(found.absent) == ["vllm-cpu"]
        assert "not installed" in found.absent["vllm-cpu"]


@pytest.mark.usefixtures("without_models")
def test_llama_cpp_takes_no_part_with_a_model_in_a_folder(tmp_path: Path) -> None:
    answering(tmp_path / "llama-cpp")
    config = WorkerConfig(worker_id="bench", model=tmp_path.as_uri(), threads=1)
    given = wanted(tmp_path, config=config, against=("llama-cpp",))
    with lineup(given, lambda _: None) as found:
        assert ".gguf" in found.absent["llama-cpp"]


def test_the_type_of_a_model_file_is_that_of_most_values() -> None:
    assert most_stored_type(locate("bundled://smollm2-135m-instruct")) == "Q4_1"


# --- the command -----------------------------------------------------------------------------


def test_the_command_knows_the_rows_and_forms_that_there_are() -> None:
    assert tuple(ROWS) == engine_command._ROWS
    assert tuple(FORMS) == engine_command._FORMS


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench, ["engine", *arguments])
    return result.exit_code, result.output


@pytest.mark.usefixtures("quick", "without_models")
def test_the_report_has_everyone_side_by_side_and_names_the_absent(tmp_path: Path) -> None:
    answering(tmp_path / "llama-cpp")
    report = tmp_path / "report.json"
    code, printed = run(
        *("--against", "vllm-cpu,llama-cpp", "--rivals", str(tmp_path), "--runs", "2"),
        *("--forms", "full,int8", "--rows", "decode-1,run-16", "--json", str(report)),
    )
    assert code == 0, printed
    assert "vllm-cpu takes no part: it is not installed" in printed.replace("\n", " ")
    for column in ("kvasir bfloat16", "kvasir int8", "llama-cpp Q4_1", "memory GB/s"):
        assert column in printed
    written: Mapping[str, Any] = json.loads(report.read_text())
    decode, whole = written["figures"]
    assert decode["key"] == "decode-1"
    assert whole["values"]["llama-cpp"] == pytest.approx([32.0, 32.0])
    assert decode["ratios"]["kvasir int8"]["llama-cpp Q4_1"]["median"] == pytest.approx(5.0)
    assert list(decode["ratios"]["kvasir bfloat16"]) == ["llama-cpp"]
    assert written["settings"]["llama-cpp"] == "9.9 bfloat16"


@pytest.mark.usefixtures("quick", "without_models")
@pytest.mark.parametrize(("after", "values"), [(0, 0), (1, 0), (2, 1)])
def test_a_rival_that_dies_has_failed_and_everybody_else_is_measured(
    tmp_path: Path, after: int, values: int
) -> None:
    """In the unmeasured round, in the first run, in the second."""
    answering(tmp_path / "vllm-cpu")
    dying(tmp_path / "llama-cpp", after=after)
    report = tmp_path / "report.json"
    code, printed = run(
        *("--against", "vllm-cpu,llama-cpp", "--rivals", str(tmp_path), "--runs", "3"),
        *("--forms", "full", "--rows", "run-16", "--json", str(report)),
    )
    assert code == 1, printed
    assert printed.count("llama-cpp ended with exit code 1; its log ends:\nout of memory") == 1
    failed = 16 * (3 - values)
    assert f"kvasir bench: {failed} requests failed" in printed
    written: Mapping[str, Any] = json.loads(report.read_text())
    (figure,) = written["figures"]
    assert figure["failed"] == {"kvasir bfloat16": 0, "vllm-cpu": 0, "llama-cpp": failed}
    assert {name: len(found) for name, found in figure["values"].items()} == {
        "kvasir bfloat16": 3,
        "vllm-cpu": 3,
        "llama-cpp": values,
    }
    assert "out of memory" in written["lost"]["llama-cpp"]


@pytest.mark.usefixtures("quick", "without_models")
def test_a_rival_that_hangs_has_failed_and_everybody_else_is_measured(tmp_path: Path) -> None:
    answering(tmp_path / "vllm-cpu")
    install(
        tmp_path / "llama-cpp",
        """import time; print('{"version": "1"}', flush=True); time.sleep(600)""",
    )
    (tmp_path / "llama-cpp" / ".installed").touch()
    report = tmp_path / "report.json"
    code, printed = run(
        *("--against", "vllm-cpu,llama-cpp", "--rivals", str(tmp_path), "--runs", "1"),
        *("--forms", "full", "--rows", "run-16", "--json", str(report), "--rival-timeout", "5s"),
    )
    assert code == 1, printed
    assert printed.count("llama-cpp gave no answer within 5 s and was ended") == 1
    written: Mapping[str, Any] = json.loads(report.read_text())
    (figure,) = written["figures"]
    assert figure["failed"] == {"kvasir bfloat16": 0, "vllm-cpu": 0, "llama-cpp": 16}
    assert [len(values) for values in figure["values"].values()] == [1, 1, 0]


@pytest.mark.usefixtures("quick", "without_models")
def test_a_rival_that_cannot_start_is_fatal(tmp_path: Path) -> None:
    install(tmp_path / "llama-cpp", "import sys; sys.exit('no model')")
    (tmp_path / "llama-cpp" / ".installed").touch()
    code, printed = run(
        *("--against", "llama-cpp", "--rivals", str(tmp_path), "--forms", "full"),
        *("--rows", "run-16"),
    )
    assert code == 1
    assert printed.rstrip().endswith("its log ends:\nno model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--against", "vllm"), "'vllm' is none of vllm-cpu, llama-cpp"),
        (("--rows", "decode-2"), "'decode-2' is none of decode-1"),
        (("--forms", "int8,int8"), "none twice"),
        (("--forms", ""), "name at least one"),
        (("--max-batched-tokens", "16"), "x>=256"),
        (("--through-router", "--rows", "decode-1"), "--through-router measures whole runs"),
        (("--through-router", "--rows", "prefill,cached"), "run-16 or run-64 in --rows"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    code, printed = run(*arguments)
    assert code == 2
    assert message in printed
