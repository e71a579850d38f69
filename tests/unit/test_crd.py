"""The CustomResourceDefinitions: complete, structural, small, and alike with the models.

The walk asks the models what they do with a value; it does not read how they are declared.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from kvasir.operator.crd import RESOURCES, Resource, custom_resource_definition, to_yaml
from kvasir.operator.modelservice import ModelService
from kvasir.operator.quantity import parse_bytes, parse_duration
from kvasir.operator.resource_status import (
    Condition,
    LastDecision,
    ModelServiceStatus,
    Roles,
    RoleStatus,
    WorkerPoolStatus,
    dump,
)
from kvasir.operator.schema import structural
from kvasir.operator.workerpool import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvasir" / "crds"
LARGEST_ANNOTATION = 256 * 1024
"""Bytes of all annotations together; client-side apply keeps the whole object in one."""

Path_ = tuple[str, ...]
Schema = dict[str, Any]


def schema_of(resource: Resource) -> Schema:
    definition = custom_resource_definition(resource)
    found: Schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def walk(schema: Schema, path: Path_ = ()) -> Iterator[tuple[Path_, Schema]]:
    """Each field under ``schema``; the values of a map are under ``*``, of a list under ``[]``."""
    for name, child in schema.get("properties", {}).items():
        yield (*path, name), child
        yield from walk(child, (*path, name))
    for key, below in (("additionalProperties", "*"), ("items", "[]")):
        if key in schema:
            yield (*path, below), schema[key]
            yield from walk(schema[key], (*path, below))


EXAMPLES: dict[str, Any] = {
    "source": "file:///model",
    "minReplicas": 1,
    "maxReplicas": 1024,
    "resourceName": "example.com/accelerator",
    "modelService": "a",
    "role": "decode",
    "replicas": 1,
}
"""Values of all fields that are required."""
ABSENT = object()
SPEC_FIELDS = [
    (resource, path, schema)
    for resource in RESOURCES
    for path, schema in walk(schema_of(resource)["properties"]["spec"])
]


def only_required(schema: Schema) -> Schema:
    return {
        name: EXAMPLES[name] if name in EXAMPLES else only_required(schema["properties"][name])
        for name in schema.get("required", ())
    }


def read(resource: Resource, path: Path_, value: object = ABSENT) -> BaseModel:
    """The resource as its model reads it, with ``value`` at ``path`` of its spec.

    Beside that there is only what is required, there and on the way there.
    """
    schema = schema_of(resource)["properties"]["spec"]
    spec = place = only_required(schema)
    for part in path[:-1]:
        schema = schema["properties"][part]
        place = place.setdefault(part, only_required(schema))
    if value is not ABSENT:
        place[path[-1]] = value
    document = {
        "apiVersion": "kvasir.dev/v1alpha1",
        "kind": resource.kind,
        "metadata": {"name": "a-decode"},
        "spec": spec,
    }
    return resource.model.model_validate(document)


def value_at(model: BaseModel, path: Path_) -> object:
    value: Any = model
    for part in path:
        fields = {field.alias: name for name, field in type(value).model_fields.items()}
        value = getattr(value, fields[part])
    return value


def refused(resource: Resource, path: Path_, value: object) -> bool:
    try:
        read(resource, path, value)
    except ValidationError as error:
        # The walk writes map entries under "*", which is a key like any other.
        return any(".".join(path) in ".".join(map(str, e["loc"])) for e in error.errors())
    return False


def ids(value: object) -> str | None:
    return ".".join(value) if isinstance(value, tuple) else getattr(value, "kind", "")


fields = pytest.mark.parametrize(("resource", "path", "schema"), SPEC_FIELDS, ids=ids)
resources = pytest.mark.parametrize("resource", RESOURCES, ids=ids)


def test_the_walk_sees_the_fields() -> None:
    paths = {path for _, path, _ in SPEC_FIELDS}
    assert len(paths) > 60
    assert ("prefill", "resources", "limits", "*") in paths
    assert ("decode", "scaling", "maxReplicas") in paths


@fields
def test_limits_are_those_of_the_model(resource: Resource, path: Path_, schema: Schema) -> None:
    for bound, outside in (("minimum", -1), ("maximum", 1)):
        if bound in schema:
            assert not refused(resource, path, schema[bound])
            assert refused(resource, path, schema[bound] + outside)
    if "enum" in schema:
        assert not any(refused(resource, path, value) for value in schema["enum"])
        assert refused(resource, path, "something-else")
    if "maxLength" in schema:
        assert refused(resource, path, "1" * (schema["maxLength"] + 1))
    if "maxProperties" in schema:
        entries = dict.fromkeys(map(str, range(schema["maxProperties"])), 1)
        assert not refused(resource, path, entries)
        assert refused(resource, path, {**entries, "one-more": 1})


@fields
def test_each_field_is_bounded(resource: Resource, path: Path_, schema: Schema) -> None:
    if schema.get("x-kubernetes-int-or-string"):
        assert {"minimum", "maximum", "maxLength"} <= schema.keys()
    elif schema["type"] == "integer":
        assert {"minimum", "maximum"} <= schema.keys()
    elif schema["type"] == "string":
        assert "enum" in schema or "maxLength" in schema
    elif "additionalProperties" in schema:
        assert "maxProperties" in schema


@pytest.mark.parametrize(
    ("resource", "path", "schema"), [each for each in SPEC_FIELDS if each[1][-1] != "*"], ids=ids
)
def test_defaults_are_those_of_the_model(resource: Resource, path: Path_, schema: Schema) -> None:
    if path[-1] in EXAMPLES and path[-2:-1] not in (("prefill",), ("decode",), ("router",)):
        assert "default" not in schema
        return
    found = value_at(read(resource, path), ("spec", *path))
    match schema.get("default"):
        case None:
            assert found is None or path == ("model",)
        case {}:
            assert found == {} or isinstance(found, BaseModel)
        case str(written) if "enum" not in schema:
            assert found == (parse_bytes if path[-1] == "kvCacheMemory" else parse_duration)(
                written
            )
        case default:
            assert found == default


@fields
def test_only_the_template_takes_anything(resource: Resource, path: Path_, schema: Schema) -> None:
    assert ("x-kubernetes-preserve-unknown-fields" in schema) == (path[-1] == "template")


@resources
def test_every_field_is_explained(resource: Resource) -> None:
    properties = schema_of(resource)["properties"]
    for part in ("spec", "status"):
        for path, schema in walk(properties[part], (part,)):
            if path[-1] not in ("*", "[]"):
                assert len(schema.get("description", "")) > 8, ".".join(path)
                assert schema["description"].endswith("."), ".".join(path)


@resources
def test_every_rule_has_a_message_with_the_fix(resource: Resource) -> None:
    schema = schema_of(resource)
    found = [
        rule
        for each in (schema, *(below for _, below in walk(schema)))
        for rule in each.get("x-kubernetes-validations", ())
    ]
    assert found
    for rule in found:
        assert rule["message"][0].islower()
        assert "; " in rule["message"] or rule["message"].startswith("must be")


@resources
def test_the_schema_is_structural(resource: Resource) -> None:
    for path, schema in walk(schema_of(resource)):
        assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "const", "nullable"} & set(schema)
        typed = "type" in schema
        assert typed != bool(schema.get("x-kubernetes-int-or-string")), path
        assert not {"properties", "additionalProperties"} <= schema.keys(), path


@resources
def test_small_enough_for_client_side_apply(resource: Resource) -> None:
    assert len(json.dumps(custom_resource_definition(resource))) < LARGEST_ANNOTATION / 4


@resources
def test_the_chart_has_what_the_models_generate(resource: Resource) -> None:
    text = (CHART / f"{resource.plural}.yaml").read_text("utf-8")
    assert text == to_yaml(resource)
    assert yaml.safe_load(text) == custom_resource_definition(resource)
    assert "{{" not in text


def test_the_chart_has_nothing_else() -> None:
    assert {file.stem for file in CHART.iterdir()} == {each.plural for each in RESOURCES}


def test_a_construct_without_a_structural_form_is_refused() -> None:
    class Odd(BaseModel):
        either: int | str

    class Patterned(BaseModel):
        ratio: float | None = None
        model_config = {"json_schema_extra": {"patternProperties": {}}}

    with pytest.raises(ValueError, match="too many values"):
        structural(Odd)
    with pytest.raises(ValueError, match="Patterned: patternProperties"):
        structural(Patterned)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"role": "router"}, "role"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": 1025}, "replicas"),
        ({"replicas": None}, "replicas"),
        ({"modelService": "A"}, "modelService"),
        ({"modelService": "a" * 41}, "modelService"),
        ({"image": "x"}, "image"),
    ],
)
def test_invalid_worker_pools(change: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=f"spec.{field}"):
        WorkerPool.model_validate(
            {
                "apiVersion": "kvasir.dev/v1alpha1",
                "kind": "WorkerPool",
                "metadata": {"name": "a-decode"},
                "spec": {"modelService": "a", "role": "decode", "replicas": 1, **change},
            }
        )


def test_a_status_is_dumped_as_the_api_server_takes_it() -> None:
    time = "2026-01-01T00:00:00Z"
    status = ModelServiceStatus.model_validate_json(
        json.dumps(
            {
                "observedGeneration": 2,
                "conditions": [
                    {
                        "type": "Ready",
                        "status": "True",
                        "reason": "AllReady",
                        "message": "1 prefill and 1 decode worker take requests.",
                        "lastTransitionTime": time,
                        "observedGeneration": 2,
                    }
                ],
                "lastDecision": {"time": time, "role": "decode", "desired": 2, "reason": "KV use"},
            }
        )
    )
    assert isinstance(status.conditions[0], Condition)
    assert isinstance(status.last_decision, LastDecision)
    assert status.roles == Roles(prefill=RoleStatus(), decode=RoleStatus())
    dumped = dump(status)
    assert dumped["conditions"][0]["lastTransitionTime"] == time
    decision = {"time": time, "role": "decode", "desired": 2, "reason": "KV use", "inputs": {}}
    assert dumped["lastDecision"] == decision
    assert "url" not in dumped
    assert dump(WorkerPoolStatus(replicas=3, selector="a=b"))["selector"] == "a=b"


@pytest.mark.parametrize("sample", sorted((ROOT / "deploy" / "samples").glob("*.yaml")), ids=str)
def test_samples_use_fields_that_exist(sample: Path) -> None:
    document = yaml.safe_load(sample.read_text("utf-8"))
    assert ModelService.model_validate(document).name
