"""What a chart, image or sample must be before any cluster sees it."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvasir.operator import manifest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvasir"
SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MINIMAL = ROOT / "deploy" / "samples" / "01-minimal.yaml"

OPEN = {
    # Maps whose keys the user chooses, and the one union of Kubernetes too large to repeat.
    ("$defs", "amounts"),
    ("$defs", "strings"),
    ("$defs", "labels"),
    ("extraVolumes", "[]"),
}


def schemas(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Every schema within, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from schemas(child, (*path, name))
    if "items" in schema:
        yield from schemas(schema["items"], (*path, "[]"))
    for name, child in schema.get("$defs", {}).items():
        yield from schemas(child, (*path, "$defs", name))


def test_every_object_of_the_values_is_closed() -> None:
    objects = {path: each for path, each in schemas(SCHEMA) if each.get("type") == "object"}
    is_open = {path for path, each in objects.items() if each.get("additionalProperties", True)}
    assert is_open == OPEN


def test_every_value_is_described_and_typed() -> None:
    for path, each in schemas(SCHEMA):
        if path[:1] == ("$defs",) and len(path) == 2:
            continue  # described where it is used
        assert each.get("description", "").endswith("."), path
        assert {"type", "enum", "$ref"} & each.keys(), path


def described(values: Any, schema: dict[str, Any], path: str = "") -> None:
    """Every default is known to the schema, and the other way round."""
    schema = {**SCHEMA["$defs"].get(schema.get("$ref", "").rpartition("/")[2], {}), **schema}
    if "properties" in schema and isinstance(values, dict):
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for name, value in values.items():
            described(value, schema["properties"][name], f"{path}.{name}")


def test_values_and_schema_name_the_same() -> None:
    described(yaml.safe_load((CHART / "values.yaml").read_text("utf-8")), SCHEMA)


def test_the_readme_lists_every_value() -> None:
    rows = [
        line for line in (CHART / "README.md").read_text("utf-8").splitlines() if line[:2] == "| "
    ]
    cells = " ".join(row.split("|")[1] for row in rows)
    listed = set(re.findall(r"`([A-Za-z.]+)`", cells))
    top = set(SCHEMA["properties"]) - {"global"}
    assert {name.split(".")[0] for name in listed} - {"repository", "digest"} == top
    for group in ("images", "serviceMonitor", "networkPolicy"):
        names = {f"{group}.{name}" for name in SCHEMA["properties"][group]["properties"]}
        assert names <= listed


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]


def test_the_notes_show_the_smallest_sample() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text("utf-8")
    shown = re.search(r"<<'END'\n(.*?)\n *END\n", notes, re.DOTALL)
    assert shown is not None
    assert manifest.parse(shown[1]) == manifest.load(MINIMAL)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_valid_and_says_what_works(path: Path) -> None:
    manifest.load(path)
    header = re.match(r"(?:#.*\n)+", path.read_text("utf-8"))
    assert header is not None
    assert path == MINIMAL or "What works today:" in header[0]


def test_there_are_all_samples() -> None:
    assert [path.name for path in SAMPLES] == [
        *("01-minimal.yaml", "02-gpu-pools.yaml", "03-autoscaled.yaml", "04-vllm-engine.yaml"),
        "05-speculative.yaml",
    ]


Stage = list[tuple[str, str]]


def stages(path: Path) -> tuple[dict[str, str], list[Stage]]:
    """Arguments before the first stage, and each stage as (instruction, rest of the line)."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", path.read_text("utf-8")))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    found: list[Stage] = []
    arguments: dict[str, str] = {}
    for instruction, rest in lines:
        if instruction == "FROM":
            found.append([])
        if found:
            found[-1].append((instruction, rest))
        else:
            assert instruction == "ARG"
            name, _, value = rest.partition("=")
            arguments[name] = value
    return arguments, found


def test_every_component_has_an_image() -> None:
    assert [path.name for path in DOCKERFILES] == [
        f"{component}.Dockerfile" for component in ("operator", "router", "worker")
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_small_pinned_and_not_root(path: Path) -> None:
    component = path.stem
    arguments, (build, final) = stages(path)
    for kind, image in (build[0], final[0]):
        assert kind == "FROM"
        assert re.fullmatch(r"\$\{BASE\}( AS build)?", image)
    assert re.fullmatch(r".+/python:\d+\.\d+\.\d+-slim-[a-z]+", arguments["BASE"])

    instructions = [kind for kind, _ in final]
    assert "RUN" not in instructions  # what builds is not in the image
    users = [rest for kind, rest in final if kind == "USER"]
    assert users == ["65532:65532"]
    assert instructions.index("USER") > instructions.index("COPY")
    assert final[-1] == ("ENTRYPOINT", f'["kvasir-{component}"]')
    assert f"kvasir-{component}" in PROJECT["scripts"]

    for kind, rest in (*build, *final):
        assert kind in {"FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "ENTRYPOINT"}
        assert "latest" not in rest
        assert not re.search(r"\b(sudo|curl|wget)\b", rest)
    packages = [rest for _, rest in build if "apt-get" in rest]
    # The worker's kernels need a compiler, which stays in the first stage.
    assert len(packages) == (component == "worker")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_installs_its_own_extra_with_hashes(path: Path) -> None:
    _, (build, _) = stages(path)
    commands = [command for kind, rest in build if kind == "RUN" for command in rest.split("&&")]
    installs = [" ".join(command.split()) for command in commands if "pip install" in command]
    assert len(installs) == 4
    for command in installs:
        if re.search(r" uv==\d+\.\d+\.\d+$", command) or "--no-index" in command:
            continue
        assert "--require-hashes --constraint requirements.lock" in command
    extras = [extra for command in installs for extra in re.findall(r"--extra (\S+)", command)]
    assert extras == [path.stem]
    assert path.stem in PROJECT["optional-dependencies"]


def test_images_need_the_same_uv_as_the_project() -> None:
    setup = (ROOT / "deploy" / "dev" / "setup.sh").read_text("utf-8")
    version = re.search(r"^uv_version=(\S+)$", setup, re.MULTILINE)
    assert version is not None
    for path in DOCKERFILES:
        assert f"uv=={version[1]}\n" in path.read_text("utf-8")
