"""Random ModelServices for hypothesis: valid ones with some fields changed, mostly for the worse.

Nulls and whole numbers written with a fraction are left out: see test_crds_invalid.
"""

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from helpers.custom_resources import SOURCE, service
from kvasir.operator.crd import RESOURCES, custom_resource_definition
from kvasir.operator.quantity import DURATION_PATTERN, QUANTITY_PATTERN


def fields(
    schema: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for name, child in schema.get("properties", {}).items():
        yield (*path, name), child
        yield from fields(child, (*path, name))
    if "additionalProperties" in schema:
        yield (*path, "cpu"), schema["additionalProperties"]


VERSION = custom_resource_definition(RESOURCES[0])["spec"]["versions"][0]
FIELDS = dict(fields(VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]))

FRACTIONS = st.integers(-(2**40), 2**40).map(lambda number: number + 0.5)
QUANTITIES = st.from_regex(re.compile(QUANTITY_PATTERN, re.ASCII), fullmatch=True)
DURATIONS = st.from_regex(re.compile(DURATION_PATTERN, re.ASCII), fullmatch=True)
SOURCES = st.from_regex(r"(bundled|hf|pvc|file)://[a-z/@.]{0,12}", fullmatch=True)
LEAVES = (
    *(st.booleans(), st.integers(), FRACTIONS, st.text(max_size=8)),
    *(QUANTITIES, DURATIONS, SOURCES),
)
ANYTHING = st.recursive(
    st.one_of(LEAVES),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["minReplicas", "cpu", "spec", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


EXAMPLES = {"source": "hf://a/b", "minReplicas": 1, "maxReplicas": 2, "resourceName": "a.b/c"}
"""Valid values of the fields that are required."""


def near(schema: dict[str, Any]) -> st.SearchStrategy[object]:
    """Values of about the right kind, valid ones among them."""
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "other"])
    if schema.get("type") == "integer":
        return st.integers(schema["minimum"] - 1, 70) | st.just(schema["maximum"] + 1)
    if schema.get("type") == "boolean":
        return st.booleans()
    if "properties" in schema:
        return st.just({name: EXAMPLES[name] for name in schema.get("required", ())})
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return st.dictionaries(st.sampled_from(["spec", "x"]), ANYTHING, max_size=2)
    if "additionalProperties" in schema:
        return st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES, max_size=2)
    if schema.get("x-kubernetes-int-or-string"):
        return QUANTITIES | st.integers(-2, 2**51)
    return DURATIONS | SOURCES | st.sampled_from(["1s", "a.b/c"])


@st.composite
def changes(draw: st.DrawFn) -> dict[tuple[str, ...], object]:
    """Values for up to four fields of a spec; now and then anything at all."""
    paths = draw(st.lists(st.sampled_from(list(FIELDS)), min_size=1, max_size=4, unique=True))
    odd = draw(st.integers(0, 9)) == 0
    return {path: draw(ANYTHING if odd else near(FIELDS[path])) for path in paths}


def changed(each: dict[tuple[str, ...], object]) -> dict[str, Any]:
    """A valid service with values for fields of its spec, the outer ones first."""
    spec: dict[str, Any] = {"model": dict(SOURCE)}
    for path, value in sorted(each.items(), key=lambda change: len(change[0])):
        place = spec
        for part in path[:-1]:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                break
            place = below
        else:
            place[path[-1]] = value
    document = service({})
    document["spec"] = spec
    return document
