"""One ModelService on a cluster with real nodes, made from the minimal sample, and its client."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.clients import CommandError
from cluster.installation import Installation, client_pod, minimal_sample
from cluster.load import LoadClient
from cluster.node_cluster import NodeCluster
from cluster.processes import wait_until

NAME = "smollm2"
KINDS = (
    "configmaps,deployments,endpointslices,networkpolicies,pods,poddisruptionbudgets,replicasets,"
    "rolebindings,roles,serviceaccounts,services,workerpools"
)
MAX_TOKENS = 24
PROMPTS = (
    "Name three animals that live in cold seas and say what each of them eats.",
    "Why is the sky dark at night although there are so many stars in it?",
    "Write one line about an old lighthouse and the man who paints its door.",
    "Explain in a few words how bread dough rises before it is baked.",
    "What should I pack for a walk of two days in the autumn hills?",
    "Give me a short reason why bridges have gaps between their plates.",
    "How does a sailing boat move forward when the wind comes from the side?",
    "List the colors that you get when you mix blue paint with other paints.",
    "Tell me what a librarian does before the first visitors come in.",
    "Which tools does a gardener need to plant a hedge along a fence?",
    "Describe the sound of rain on a tin roof to somebody far away.",
    "Say what makes a good map of a small town for people on foot.",
)
"""Longer than the sample's minUncachedTokens, so that both pools take part."""

_SECONDS = 240
_SMALL: dict[str, dict[str, Any]] = {
    # float32: equality of tokens is claimed for it alone.
    "model": {"maxModelLen": 128, "dtype": "float32"},
    # Less than all the prompts need, so that these go to the prefill worker again and again.
    "engine": {"kvCacheMemory": "24Mi", "maxBatchedTokens": 128, "maxRunningRequests": 8},
    "rollout": {"drainDeadline": "60s"},
}


class ServedModel:
    """The sample in a namespace; `apply` changes it, the rest looks at it."""

    def __init__(self, cluster: NodeCluster, installation: Installation, namespace: str) -> None:
        self.cluster = cluster
        self.kubectl = cluster.kubectl
        self.namespace = namespace
        self._installation = installation
        self._document = _sample(cluster)

    def run(self, *arguments: str) -> str:
        return self.kubectl(*arguments, f"--namespace={self.namespace}")

    def get(self, *arguments: str) -> dict[str, Any]:
        return self.kubectl.get(*arguments, f"--namespace={self.namespace}")

    def apply(self, **changes: Mapping[str, Any]) -> None:
        """Apply the manifest with fields of parts of its spec changed; null removes a field.

        Changes stay for later calls.
        """
        for part, fields in changes.items():
            section = {**self._document["spec"].get(part, {}), **fields}
            kept = {key: value for key, value in section.items() if value is not None}
            self._document["spec"][part] = kept
        document = copy.deepcopy(self._document)
        document["metadata"]["namespace"] = self.namespace
        self.kubectl.apply(document)

    def wait_ready(self) -> None:
        """Until the newest spec is ready."""
        generation = self.get("msvc", NAME)["metadata"]["generation"]
        self.wait(f"jsonpath={{.status.observedGeneration}}={generation}", f"msvc/{NAME}")
        self.wait("condition=Ready", f"msvc/{NAME}")

    def wait(self, condition: str, what: str) -> None:
        try:
            self.run("wait", f"--for={condition}", what, f"--timeout={_SECONDS}s")
        except CommandError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from error

    def scale(self, role: str, replicas: int) -> None:
        """As a person does, and until it is done."""
        pool = f"wpool/{NAME}-{role}"
        self.run("scale", pool, f"--replicas={replicas}")
        for field in ("replicas", "readyReplicas", "updatedReplicas"):
            self.wait(f"jsonpath={{.status.{field}}}={replicas}", pool)
        self.wait_ready()

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Those that are not about to end."""
        found = self.get("pods", f"--selector=kvasir.dev/role={role}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pod_names(self, role: str) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.pods(role)}

    def wait_restarted(self, pod: str) -> None:
        """Until its container was started again and is ready."""

        def restarted() -> bool:
            found = self.get("pod", pod)["status"]["containerStatuses"][0]
            return bool(found["restartCount"] and found["ready"])

        wait_until(restarted, f"{pod} is back", _SECONDS, self.explain)

    def events(self) -> str:
        return self.run("events", f"--for=msvc/{NAME}")

    def decision(self) -> dict[str, Any]:
        """The autoscaler's latest."""
        found: dict[str, Any] = self.get("msvc", NAME)["status"].get("lastDecision", {})
        return found

    def leftovers(self) -> list[str]:
        """Objects that belong to the ModelService, whether it exists or not."""
        selector = f"--selector=kvasir.dev/modelservice={NAME}"
        return self.run("get", KINDS, selector, "--output=name").split()

    def client(self, folder: Path) -> LoadClient:
        """A pod that asks through the Service, by its address: a cluster may lack DNS."""
        self.kubectl.apply(client_pod(self.cluster, "client", self.namespace))
        self.wait("condition=Ready", "pod/client")
        service = self.get("service", NAME)["spec"]
        url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
        return LoadClient(
            self.kubectl, self.namespace, "client", url, NAME, PROMPTS, MAX_TOKENS, folder
        )

    def explain(self) -> str:
        """What a person would look at, for messages."""
        shown = self.run("get", "msvc,wpool,pods", "--output=wide")
        status = json.dumps(self.get("msvc", NAME).get("status"), indent=1)
        return f"{shown}\n{status}\n{self.events()}\n{self._installation.log()}"

    def wait_until_gone(self) -> None:
        wait_until(
            lambda: not self.leftovers(), "all gone", _SECONDS, lambda: str(self.leftovers())
        )


def _sample(cluster: NodeCluster) -> dict[str, Any]:
    """The minimal sample, made small, with pods that run in this cluster."""
    document = minimal_sample(cluster)
    spec = document["spec"]
    assert document["metadata"]["name"] == NAME
    for part, fields in _SMALL.items():
        spec[part] = {**spec.get(part, {}), **fields}
    return document
