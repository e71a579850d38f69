"""The CustomResourceDefinitions, generated from the typed resources.

``python -m kvasir.operator.crd FOLDER`` (``make crds``) writes them as YAML. Fields, defaults,
limits, rules and descriptions all come from the models; here is only what no model has: names,
subresources and the columns of ``kubectl get``.

https://kubernetes.io/docs/reference/kubernetes-api/extend-resources/custom-resource-definition-v1/
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kvasir.operator import modelservice, workerpool
from kvasir.operator.modelservice import ModelService
from kvasir.operator.resource_status import ModelServiceStatus, WorkerPoolStatus
from kvasir.operator.schema import Schema, structural
from kvasir.operator.workerpool import WorkerPool

GROUP, VERSION = modelservice.API_VERSION.split("/")

_READY = ".status.conditions[?(@.type=='Ready')]"


@dataclass(frozen=True)
class _Column:
    """One column of ``kubectl get``; a wide one is shown with ``-o wide`` only."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


_AGE = _Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True)
class Resource:
    """A custom resource: its model, and what the model does not say."""

    kind: str
    short_name: str
    model: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[_Column, ...]
    scale: dict[str, str] | None = None
    """Paths of the scale subresource, if there is one."""

    @property
    def plural(self) -> str:
        return f"{self.kind.lower()}s"


RESOURCES = (
    Resource(
        modelservice.KIND,
        "msvc",
        ModelService,
        ModelServiceStatus,
        (
            _Column("Ready", f"{_READY}.status"),
            _Column("Prefill", ".status.roles.prefill.readyReplicas", "integer"),
            _Column("Decode", ".status.roles.decode.readyReplicas", "integer"),
            _Column("Model", ".spec.model.source"),
            _Column("Reason", f"{_READY}.reason", wide=True),
            _AGE,
        ),
    ),
    Resource(
        workerpool.KIND,
        "wpool",
        WorkerPool,
        WorkerPoolStatus,
        (
            _Column("Role", ".spec.role"),
            _Column("Desired", ".spec.replicas", "integer"),
            _Column("Ready", ".status.readyReplicas", "integer"),
            _Column("Draining", ".status.drainingReplicas", "integer"),
            _AGE,
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    ),
)


def custom_resource_definition(resource: Resource) -> dict[str, Any]:
    """The CustomResourceDefinition, ready to apply."""
    subresources: dict[str, Any] = {"status": {}}
    if resource.scale is not None:
        subresources["scale"] = resource.scale
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": [resource.short_name],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": [_printed(each) for each in resource.columns],
                    "schema": {"openAPIV3Schema": _schema(resource)},
                }
            ],
        },
    }


def to_yaml(resource: Resource) -> str:
    """The CustomResourceDefinition as the file in the chart has it."""
    head = f"# Generated from {resource.model.__module__} by `make crds`; edit there.\n"
    definition = custom_resource_definition(resource)
    return head + yaml.dump(definition, Dumper=_PlainDumper, sort_keys=False, width=100)


class _PlainDumper(yaml.SafeDumper):
    """Without anchors: what is equal is written twice, so that a part can be read alone."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def _printed(column: _Column) -> dict[str, Any]:
    shown = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**shown, "priority": 1} if column.wide else shown


def _schema(resource: Resource) -> Schema:
    whole = structural(resource.model)
    properties = whole["properties"]
    return {
        **{key: value for key, value in whole.items() if key not in ("required", "properties")},
        "required": ["spec"],
        "properties": {
            # The API server's own; a schema may narrow only the name.
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": properties["metadata"]["properties"]["name"]},
            },
            "spec": properties["spec"],
            "status": structural(resource.status),
        },
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for resource in RESOURCES:
        (folder / f"{resource.plural}.yaml").write_text(to_yaml(resource), encoding="utf-8")


if __name__ == "__main__":
    main()
