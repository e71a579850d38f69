"""Builds the kernels: at installation for every target, or on first use for this machine's.

A library's file name holds a digest of all that it was made from, so a stale one is never found.
Files appear under their names only when complete: two processes may build at once, and one may
be killed. Runs while the package is being installed, too, so it imports nothing but the standard
library and ``targets``.

    python -m kvasir.worker.kernels.build     build every target into the package
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvasir.worker.kernels.targets import TARGETS, Target

SOURCES = Path(__file__).parent / "cpp"
PACKAGED = Path(__file__).parent / "built"
"""Libraries that were built at installation."""

FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
# GCC 12's own AVX-512 header starts from undefined vectors, and says so wherever it is inlined.
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
_TIMEOUT_S = 600.0


class BuildError(Exception):
    """Why there is no library; one line."""


def cache_folder() -> Path:
    """Where libraries built on first use are kept, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "kernels"


def packaged_library(target: Target) -> Path:
    """Where installation puts the library of the present sources."""
    return PACKAGED / f"{target.name}-{_digest(target.flags)}.so"


def cached_library(target: Target, extra_flags: Sequence[str] = ()) -> Path:
    """The library in the cache, built now if it is not there. BuildError says why it cannot be."""
    compiler = find_compiler()
    digest = _digest((*target.flags, *extra_flags, compiler, _version(compiler)))
    path = cache_folder() / f"{target.name}-{digest}.so"
    if not path.is_file():
        compile_library(compiler, target, path, extra_flags)
    return path


def find_compiler() -> str:
    """The C++ compiler: $CXX, or the first of the usual names."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler was found (install g++ or clang++, or set CXX)")


def compile_library(
    compiler: str, target: Target, path: Path, extra_flags: Sequence[str] = ()
) -> None:
    """Compile all sources into ``path``."""
    units = sorted(str(unit) for unit in SOURCES.glob("*.cpp"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
            library = Path(folder) / path.name
            subprocess.run(
                (compiler, *FLAGS, *_QUIET, *target.flags, *extra_flags, "-o", library, *units),
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
            library.replace(path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror})") from error
    except subprocess.CalledProcessError as error:
        said = next(
            (line for line in error.stderr.splitlines() if "error" in line), "it said nothing"
        )
        raise BuildError(f"{compiler} failed: {said}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {_TIMEOUT_S:g} s") from error


def build_packaged() -> None:
    """Build every target into the package, and remove libraries of other sources."""
    compiler = find_compiler()
    wanted = {packaged_library(target): target for target in TARGETS}
    for path, target in wanted.items():
        if not path.is_file():
            compile_library(compiler, target, path)
    for path in PACKAGED.glob("*.so"):
        if path not in wanted:
            path.unlink()


def _digest(parts: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, *_QUIET, *parts)).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        told = subprocess.run(
            (compiler, "--version"), check=True, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} --version failed ({error})") from error
    return told.stdout.partition("\n")[0]


def main() -> int:
    """Entry point of ``python -m``; building is optional, so a failure is told and is none."""
    try:
        build_packaged()
    except BuildError as error:
        print(f"the CPU kernels were not built: {error}", file=sys.stderr)  # noqa: T201  # a tool
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
