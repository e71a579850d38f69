"""The CPU kernels under the address sanitizer, in a process of their own that preloads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.worker.kernels import build
from kvasir.worker.kernels.targets import usable_targets

SANITIZED = ("-fsanitize=address", "-fno-omit-frame-pointer", "-O1", "-g")


@pytest.fixture(scope="module")
def compiler() -> str:
    try:
        return build.find_compiler()
    except build.BuildError as error:
        pytest.skip(f"NO CPU KERNELS TO TEST: {error}")


@pytest.fixture(scope="module")
def runtime(compiler: str) -> str:
    """The sanitizer's own library."""
    told = subprocess.run(
        (compiler, "-print-file-name=libasan.so"), check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(told).is_absolute():
        pytest.skip(f"NO SANITIZED KERNELS TO TEST: {compiler} comes without libasan")
    return told


@pytest.mark.parametrize("name", [target.name for target in usable_targets()])
def test_no_access_out_of_bounds(name: str, compiler: str, runtime: str, tmp_path: Path) -> None:
    target = next(target for target in usable_targets() if target.name == name)
    library = tmp_path / f"{name}.so"
    build.compile_library(compiler, target, library, SANITIZED)
    # Python itself leaks by design; its allocations of small objects are none of our business.
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": "tests",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        (sys.executable, "-m", "helpers.kernel_cases", str(library)),
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all cases passed" in done.stdout
