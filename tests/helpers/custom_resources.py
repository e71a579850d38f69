"""The custom resources in a cluster that tests start: installed, created, refused, deleted."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.api import ApiClient, ApiError
from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from kvasir.operator.crd import RESOURCES

CRDS = Path(__file__).resolve().parents[2] / "charts" / "kvasir" / "crds"
SOURCE = {"source": "file:///model"}


def install(kubectl: Kubectl) -> None:
    """The definitions of the chart, and wait until the API server knows the resources."""
    kubectl("apply", f"--filename={CRDS}")  # client-side, as people do
    for resource in RESOURCES:
        name = f"crd/{resource.plural}.kvasir.dev"
        kubectl("wait", "--for=condition=Established", name, "--timeout=60s")


class Services:
    """ModelServices of one namespace, over the plain API."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self._path = f"/apis/kvasir.dev/v1alpha1/namespaces/{namespace}/modelservices"

    def create(self, document: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """The object as stored. Raises ApiError."""
        validation = "Strict" if strict else "Ignore"
        return self._client.create(f"{self._path}?fieldValidation={validation}", document)

    def refusal(self, document: dict[str, Any]) -> str:
        """What the API server says to the document, which it must refuse."""
        message = self.try_create(document)
        assert message, "accepted"
        return message

    def try_create(self, document: dict[str, Any]) -> str:
        """Why the API server refuses the document; empty if it stored it."""
        try:
            self.create(document)
        except ApiError as error:
            if error.status not in (400, 422):
                raise
            message: str = json.loads(str(error).partition(": ")[2])["message"]
            return message
        return ""

    def delete(self, name: str) -> None:
        """Delete it; it must be gone."""
        self._client.delete(f"{self._path}/{name}")
        with pytest.raises(ApiError, match="not found"):
            self._client.get(f"{self._path}/{name}")


@contextmanager
def services_in(control_plane: ControlPlane, namespace: str) -> Iterator[Services]:
    client = control_plane.client()
    try:
        yield Services(client, namespace)
    finally:
        client.close()


def service(spec: dict[str, Any], name: str = "a") -> dict[str, Any]:
    """A ModelService; `spec` without a model gets one."""
    return {
        "apiVersion": "kvasir.dev/v1alpha1",
        "kind": "ModelService",
        "metadata": {"name": name},
        "spec": {"model": SOURCE, **spec},
    }
