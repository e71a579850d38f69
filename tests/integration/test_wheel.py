"""The wheel, as images are built from it: kernels inside, usable where there is no compiler."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvasir.worker.kernels.build import BuildError, find_compiler
from kvasir.worker.kernels.targets import TARGETS, usable_targets

ROOT = Path(__file__).parents[2]
PROBE = """
from kvasir.worker.kernels.build import packaged_library
from kvasir.worker.kernels.library import Kernels, find_kernels
from kvasir.worker.kernels.targets import usable_targets
found = find_kernels()
assert isinstance(found, Kernels), found
print(packaged_library(usable_targets()[0]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel")
    subprocess.run((*command, "--directory", folder), cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_kernels_of_every_target_and_their_sources(wheel: Path) -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"NO KERNELS TO PACK: {error}")
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    built = sorted(name.name.partition("-")[0] for name in names if name.suffix == ".so")
    assert built == sorted(target.name for target in TARGETS)
    assert {"gemm.h", "step.cpp"} <= {name.name for name in names if name.parent.name == "cpp"}
    assert wheel.name.startswith("kvasir-")
    assert "-py3-none-linux_" in wheel.name  # for this platform, and any Python


def test_its_kernels_are_found_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    if not usable_targets():
        pytest.skip("THIS CPU HAS NO AVX2: NO KERNELS TO LOAD")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {
        "PATH": "",
        "PYTHONPATH": str(tmp_path / "installed"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    told = subprocess.run(
        (sys.executable, "-c", PROBE), env=environment, check=True, capture_output=True, text=True
    )
    library = Path(told.stdout.strip())
    assert library.is_relative_to(tmp_path / "installed")
    assert library.is_file()
    assert not (tmp_path / "cache").exists()
