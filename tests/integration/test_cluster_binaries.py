"""Where binaries come from, with a program in the place of Go that says what it was asked."""

import shutil
from pathlib import Path

import pytest

from cluster.binaries import BinariesMissingError, find_binaries

_GO = """#!/bin/sh
[ "$1" = env ] && echo "$GO_RELEASE" && exit
while [ "$1" != -o ]; do shift; done
echo building >> "$GO_CALLS"
printf '#!/bin/sh\\n' > "$2"
[ -z "$GO_FAILS" ] || { echo "no such package" >&2; exit 1; }
chmod +x "$2"
"""


def _quiet(line: str) -> None:
    """Where a test does not look at what is said."""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that gets a line for each build; nothing is cached yet."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "chmod"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "go").write_text(_GO)
    (tools / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GO_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("GO_RELEASE", "go1.26.3")
    monkeypatch.setenv("GO_FAILS", "")
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return tmp_path / "calls"


def test_each_is_built_once_and_said(calls: Path) -> None:
    said: list[str] = []
    found = find_binaries(["etcd", "helm"], said.append)
    assert [line.split(" in ")[0] for line in said] == [
        "cluster: building etcd (1 of 2)",
        "cluster: built etcd",
        "cluster: building helm (2 of 2)",
        "cluster: built helm",
    ]
    assert all(path.stat().st_mode & 0o100 for path in found.values())
    assert find_binaries(["helm", "etcd"], said.append) == found
    assert calls.read_text().splitlines() == ["building"] * 2


def test_an_interrupted_build_is_done_again(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GO_FAILS", "yes")
    with pytest.raises(BinariesMissingError, match="no such package"):
        find_binaries(["etcd"], _quiet)
    monkeypatch.setenv("GO_FAILS", "")
    assert find_binaries(["etcd"], _quiet)["etcd"].exists()


def test_another_go_release_builds_its_own(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_binaries(["etcd"], _quiet)
    monkeypatch.setenv("GO_RELEASE", "go1.26.4")
    assert find_binaries(["etcd"], _quiet) != first


def test_the_given_folder_comes_first(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "etcd").touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(given))
    found = find_binaries(["etcd", "helm"], _quiet)
    assert found["etcd"] == given / "etcd"
    assert found["helm"].parent != given
    assert calls.read_text().splitlines() == ["building"]


@pytest.mark.parametrize("release", ["go1.27.0", "go1.25.9", "go1.2"])
def test_another_minor_release_of_go_is_refused(
    calls: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setenv("GO_RELEASE", release)
    with pytest.raises(BinariesMissingError, match=rf"`go` is {release}.*GOTOOLCHAIN"):
        find_binaries(["etcd"])


def test_without_go_it_says_what_to_install(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BinariesMissingError, match=r"Install Go 1\.26, or set KUBEBUILDER_ASSETS"):
        find_binaries(["etcd"])
