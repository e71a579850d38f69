"""The one small image that test pods run, and the way the host's Python gets into them.

The image is made here, without a registry: a file system skeleton with `sleep` and the libraries
it needs. A pod that needs more mounts the host's /usr, this interpreter and this project read-only:
`with_host_python`. An image with the same in it would take minutes to pack and import.
"""

import copy
import hashlib
import io
import json
import platform
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.namespaces import run

IMAGE = "kvasir.test/host:1"
PAUSE = ["/usr/bin/sleep", "infinity"]
USER = 65532
_PROJECT = Path(__file__).parents[2]
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_LIBRARY_INDEX = Path("/etc/ld.so.cache")  # what programs find the libraries in /usr by
_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(path: Path) -> Path:
    """Write the image in the form that ``docker save`` writes and containerd imports."""
    layer = _layer()
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "Cmd": PAUSE,
            "Env": [f"PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        _add(archive, "layer.tar", layer)
        _add(archive, "config.json", json.dumps(config).encode())
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def with_host_python(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A pod spec whose containers have this interpreter and this project, at their host paths."""
    changed: dict[str, Any] = copy.deepcopy(dict(pod))
    paths = ["/usr", sys.base_prefix, str(_PROJECT)]
    names = [f"host-{position}" for position in range(len(paths))]
    pairs = list(zip(names, paths, strict=True))
    changed.setdefault("volumes", []).extend(
        {"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path in pairs
    )
    for container in [*changed.get("initContainers", []), *changed["containers"]]:
        container.setdefault("volumeMounts", []).extend(
            {"name": name, "mountPath": path, "readOnly": True} for name, path in pairs
        )
    return changed


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for folder in _FOLDERS:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            layer.addfile(entry)
        for name, target in _LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            layer.addfile(entry)
        # The pods' own user has no name, as in images that set it by number.
        _add(layer, "etc/passwd", b"root:x:0:0::/:/bin/sh\n")
        if _LIBRARY_INDEX.exists():
            _add(layer, str(_LIBRARY_INDEX).lstrip("/"), _LIBRARY_INDEX.read_bytes())
        for path in (PAUSE[0], *_libraries(PAUSE[0])):
            # Through the links above, so that each file has its one place below usr.
            first, _, rest = path.lstrip("/").partition("/")
            _add(layer, f"{_LINKS.get(first, first)}/{rest}", Path(path).read_bytes(), mode=0o755)
    return buffer.getvalue()


def _libraries(program: str) -> list[str]:
    """The absolute paths of the loader and the libraries of a program."""
    return re.findall(r"(/\S+) \(0x", run("ldd", program))


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
