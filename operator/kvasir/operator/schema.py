"""From a pydantic model to a structural schema, the form that Kubernetes takes.

Pure. No references, no types that may be null, no titles; unknown fields are not part of a
structural schema, since the API server drops them or, asked for strict validation, refuses them.
A model that cannot be said in that form is a broken invariant and raises.

https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = (
    *("description", "type", "format", "enum", "default", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("required", "x-kubernetes-validations", "x-kubernetes-int-or-string"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
)
_READ = ("$ref", "anyOf", "const", "properties", "items", "additionalProperties", "title")


def structural(model: type[BaseModel]) -> Schema:
    """The schema of ``model``, with the names that YAML has."""
    document = model.model_json_schema()
    return _structural(document, document.get("$defs", {}), model.__name__)


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Schema], where: str) -> Schema:
    node = _resolved(node, definitions)
    if unknown := set(node) - {*_KEPT, *_READ, "$defs"}:
        raise ValueError(f"{where}: {', '.join(sorted(unknown))}: no place in a structural schema")
    result = {key: node[key] for key in _KEPT if key in node}
    if "description" in result:
        result["description"] = _one_line(result["description"])
    if result.get("default", ...) is None:
        del result["default"]
    if "const" in node:
        result["enum"] = [node["const"]]
    if "properties" in node:
        if "default" in result:
            result["default"] = {}  # the API server fills it from the defaults of its fields
        result["properties"] = {
            name: _structural(child, definitions, f"{where}.{name}")
            for name, child in node["properties"].items()
        }
    elif (values := node.get("additionalProperties")) is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    elif values:
        result["additionalProperties"] = _structural(values, definitions, f"{where}.*")
    if "items" in node:
        result["items"] = _structural(node["items"], definitions, f"{where}[]")
    return result


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Schema]) -> Schema:
    """``node`` with the reference or the optional that it wraps put in its place."""
    node = dict(node)
    if options := node.pop("anyOf", None):
        # Kubernetes drops a null before it looks at the type: leaving out is the one way.
        (kept,) = [option for option in options if option != {"type": "null"}]
        return _resolved({**kept, **node}, definitions)
    if reference := node.pop("$ref", None):
        return _resolved({**definitions[reference.rpartition("/")[2]], **node}, definitions)
    return node


def _one_line(text: str) -> str:
    """Paragraphs stay; line breaks within them are the source file's, not the reader's."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
