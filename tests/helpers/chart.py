"""The Helm chart as tests see it: where it is, what it renders, what it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cluster.clients import Helm, Kubectl

Object = dict[str, Any]

_ROOT = Path(__file__).resolve().parents[2]
CHART = _ROOT / "charts" / "kvasir"
SAMPLES = sorted((_ROOT / "deploy" / "samples").glob("*.yaml"))
OPERATOR = "kvasir-operator"

_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_SERVICE_MONITOR = {
    # The fields that the chart uses, of a resource that the Prometheus operator would bring.
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {
            "kind": "ServiceMonitor",
            "plural": "servicemonitors",
            "singular": "servicemonitor",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["selector", "endpoints"],
                                "properties": {
                                    "selector": {
                                        "type": "object",
                                        "properties": {"matchLabels": _STRINGS},
                                    },
                                    "endpoints": {
                                        "type": "array",
                                        "items": {
                                            "type": "object",
                                            "properties": {
                                                "port": {"type": "string"},
                                                "interval": {"type": "string"},
                                            },
                                        },
                                    },
                                },
                            }
                        },
                    }
                },
            }
        ],
    },
}


def install_resources(kubectl: Kubectl) -> None:
    """Every custom resource that the chart brings or names."""
    kubectl("apply", f"--filename={CHART / 'crds'}")
    kubectl.apply(_SERVICE_MONITOR)
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


def render(helm: Helm, values: Path, namespace: str = "here") -> list[Object]:
    """The objects of the chart with a file of values."""
    shown = helm("template", "kvasir", str(CHART), f"--namespace={namespace}", f"--values={values}")
    return [each for each in yaml.safe_load_all(shown) if each]


@contextmanager
def installed(kubectl: Kubectl, helm: Helm, namespace: str, *settings: str) -> Iterator[None]:
    """The chart as a release, which leaves nothing behind."""
    sets = [f"--set={setting}" for setting in settings]
    here = f"--namespace={namespace}"
    helm("install", "kvasir", str(CHART), here, "--wait", "--timeout=90s", "--skip-crds", *sets)
    try:
        yield
    finally:
        helm("uninstall", "kvasir", here, "--wait")
    query = "--selector=app.kubernetes.io/managed-by=Helm"
    kinds = "all,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,pdb,netpol"
    left = kubectl.get(kinds, query, "--all-namespaces")["items"]
    release = "meta.helm.sh/release-namespace"
    assert [o for o in left if o["metadata"].get("annotations", {}).get(release) == namespace] == []
