"""The kernels' team of threads under the thread sanitizer: nobody passes a barrier early, and
nobody sleeps through one."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kvasir.worker.kernels.build import SOURCES, BuildError, find_compiler

STRESS = Path(__file__).parents[1] / "helpers" / "team_stress.cpp"
SECONDS = 240.0


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(f"NO COMPILER: THE TEAM IS NOT TESTED ({error})")
    program = tmp_path_factory.mktemp("team") / "stress"
    flags = ("-std=c++20", "-O2", "-g", "-pthread", "-fsanitize=thread", "-Wall", "-Wextra")
    sources = (STRESS, SOURCES / "team.cpp")
    subprocess.run((compiler, *flags, f"-I{SOURCES}", "-o", program, *sources), check=True)
    return program


@pytest.fixture(scope="module")
def in_order() -> tuple[str, ...]:
    """What a program is run under so that its addresses are not random, where the system lets it.

    With 32 random bits (vm.mmap_rnd_bits) the sanitizer of GCC 13 and older aborts otherwise.
    """
    program = shutil.which("setarch")
    if program is None:
        return ()
    prefix = (program, platform.machine(), "-R")
    allowed = subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode == 0
    return prefix if allowed else ()


@pytest.mark.parametrize(("members", "runs"), [(1, 20), (2, 2000), (3, 1000)])
def test_members_wait_for_each_other_and_wake_up(
    stress: Path, in_order: tuple[str, ...], members: int, runs: int
) -> None:
    ended = subprocess.run(
        (*in_order, stress, str(members), str(runs)),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "0 wrong\n"), ended.stderr[-3000:]
