"""The Kubernetes binaries that tests start: found, or built once by ``go build``.

A binary is looked for in ``$KUBEBUILDER_ASSETS``, then in a cache folder outside the tree. What is
missing is built from the Go module beside this file, whose go.mod pins every version. The cache
folder's name is a hash of all that decides a build, so a stale binary is never used. A build
writes to a temporary name and renames: an interrupted one is simply run again.

``python -m cluster.binaries`` (``make cluster-binaries``) builds everything ahead of the tests.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MODULE = Path(__file__).parent
_PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "helm": "helm.sh/helm/v4/cmd/helm",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE = ("kubelet", "kube-proxy")
EVERY = tuple(_PACKAGES)

# An API server of Kubernetes 1.36 that is built with Go 1.27 answers 503 at /openapi/v2.
_GO_VERSION = "go1.26"
_BUILD_FLAGS = ("-trimpath", "-tags=grpcnotrace")


class BinariesMissingError(Exception):
    """A binary is neither there nor can it be built; the message says what to install."""


def find_binaries(
    names: Iterable[str], say: Callable[[str], None] | None = None
) -> dict[str, Path]:
    """The path of each binary of `names`; `say` (stderr) gets a line before and after a build."""
    wanted = list(names)
    found = {name: path for name in wanted if (path := _from_assets(name)) is not None}
    missing = [name for name in wanted if name not in found]
    say = say or _print
    if not missing:
        return found
    go = _go_release(missing)
    folder = _cache_folder(go)
    absent = [name for name in missing if not (folder / name).exists()]
    if absent:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", say):
            for position, name in enumerate(absent, start=1):
                _build(name, folder, f"{position} of {len(absent)}", say)
    return found | {name: folder / name for name in missing}


def kubectl_path() -> Path:
    """kubectl, from the same environment as this interpreter."""
    return Path(sys.executable).parent / "kubectl"


def _from_assets(name: str) -> Path | None:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    path = Path(folder) / name if folder else None
    return path if path is not None and path.exists() else None


def _go_release(missing: list[str]) -> str:
    """The Go release, such as go1.26.3, that builds here."""
    if shutil.which("go") is None:
        raise BinariesMissingError(
            f"{', '.join(missing)}: not in $KUBEBUILDER_ASSETS, and Go is not installed to build "
            f"them. Install Go {_GO_VERSION[2:]}, or set KUBEBUILDER_ASSETS to a folder with them."
        )
    release = subprocess.run(
        ["go", "env", "GOVERSION"], check=True, capture_output=True, text=True, cwd=_MODULE
    ).stdout.strip()
    if re.match(rf"{_GO_VERSION}(\.|rc|$)", release) is None:
        raise BinariesMissingError(
            f"{', '.join(missing)}: to be built with Go {_GO_VERSION[2:]}, but `go` is {release}. "
            f"Install Go {_GO_VERSION[2:]} or set GOTOOLCHAIN to a {_GO_VERSION} release."
        )
    return release


def _cache_folder(go: str) -> Path:
    recipe = hashlib.sha256(usedforsecurity=False)
    for name in ("go.mod", "go.sum"):
        recipe.update((_MODULE / name).read_bytes())
    recipe.update(repr((go, platform.machine(), _BUILD_FLAGS, _link_flags())).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvasir" / "cluster" / recipe.hexdigest()[:16]


def _link_flags() -> str:
    """Strip symbols, and name the version: Helm charts and clients ask the API server for it."""
    match = re.search(
        r"k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", (_MODULE / "go.mod").read_text("utf-8")
    )
    assert match is not None, "go.mod requires no release of k8s.io/kubernetes"
    values = dict(zip(("gitVersion", "gitMajor", "gitMinor"), match.groups(), strict=True))
    package = "k8s.io/component-base/version"
    return " ".join(["-s -w", *(f"-X {package}.{name}={is_}" for name, is_ in values.items())])


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One build at a time, also between processes; the lock goes with the process."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("cluster: another process is building; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(name: str, folder: Path, progress: str, say: Callable[[str], None]) -> None:
    target = folder / name
    if target.exists():  # built by another process while this one waited for the lock
        return
    say(f"cluster: building {name} ({progress})")
    started = time.monotonic()
    partial = folder / f"{name}.partial"
    command = ["go", "build", *_BUILD_FLAGS, f"-ldflags={_link_flags()}", "-o", str(partial)]
    result = subprocess.run(
        [*command, _PACKAGES[name]],
        check=False,
        cwd=_MODULE,
        env={"GOFLAGS": "-buildvcs=false", **os.environ, "CGO_ENABLED": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    if result.returncode != 0:
        raise BinariesMissingError(f"go build of {name} failed:\n{result.stderr}")
    partial.replace(target)
    say(f"cluster: built {name} in {time.monotonic() - started:.0f} s")


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        for binary, where in find_binaries(EVERY).items():
            _print(f"cluster: {binary} is {where}")
    except BinariesMissingError as error:
        sys.exit(f"cluster: {error}")
