"""An operator that is killed in the middle of rollouts, and an API server that falls silent then.

The node and the workers are played. Workers have a request for a while after they are told to
drain, so that there are moments in a rollout for something to happen.
"""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.api import ApiClient, DisconnectedError
from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.processes import wait_until
from helpers.operator_daemon import Operator
from helpers.operator_stage import SECONDS, Stage, sample

KILLS = 10
DRAIN_SECONDS = 0.5


class Changes:
    """Counts what changes in a namespace, over watches; may kill an operator at a given one."""

    PATHS = (
        "/apis/apps/v1/namespaces/{}/deployments",
        "/api/v1/namespaces/{}/configmaps",
        "/api/v1/namespaces/{}/pods",
        "/apis/kvasir.dev/v1alpha1/namespaces/{}/modelservices",
        "/apis/kvasir.dev/v1alpha1/namespaces/{}/workerpools",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._seen = 0
        self._fatal = 0
        self._operator: Operator | None = None

    def kill_at(self, number: int, operator: Operator) -> None:
        """Count from now on, and end the operator at the change of this number."""
        with self._lock:
            self._seen, self._fatal, self._operator = 0, number, operator

    @property
    def seen(self) -> int:
        return self._seen

    def follow(self, client: ApiClient, path: str, version: str) -> None:
        try:
            for _ in client.watch(path, resourceVersion=version, timeoutSeconds="600"):
                self._count()
        except DisconnectedError:
            assert self._ended, "a watch broke"

    def end(self) -> None:
        self._ended = True

    def _count(self) -> None:
        with self._lock:
            self._seen += 1
            if self._operator is not None and self._seen == self._fatal:
                self._operator.process.send(signal.SIGKILL)


@contextmanager
def changes_of(control_plane: ControlPlane, namespace: str) -> Iterator[Changes]:
    counted = Changes()
    clients = [control_plane.client(timeout=600) for _ in Changes.PATHS]
    threads = []
    for client, pattern in zip(clients, Changes.PATHS, strict=True):
        path = pattern.format(namespace)
        version = client.get(path)["metadata"]["resourceVersion"]
        threads.append(threading.Thread(target=counted.follow, args=(client, path, version)))
        threads[-1].start()
    try:
        yield counted
    finally:
        counted.end()
        for client, thread in zip(clients, threads, strict=True):
            client.interrupt()
            thread.join()
            client.close()


def state(stage: Stage) -> dict[str, Any]:
    """All that a service consists of, and its status, without what differs from run to run."""
    kinds = "deploy,cm,svc,sa,role,rolebinding,pdb,netpol,wpool"
    items = stage.get(kinds, "--selector=kvasir.dev/modelservice=smollm2")["items"]
    pods = stage.get("pods")["items"]
    status = stage.get("msvc", "smollm2")["status"]
    return {
        **{f"{each['kind']} {each['metadata']['name']}": _told(each) for each in items},
        "pods": Counter(
            (each["metadata"]["generateName"], *map(str, map(_metadata(each).get, _METADATA)))
            for each in pods
        ),
        "conditions": [
            (each["type"], each["status"], each["reason"]) for each in status["conditions"]
        ],
        "roles": status["roles"],
    }


_METADATA = ("labels", "annotations")
_PARTS = ("spec", "data", "rules", "roleRef", "subjects")
_CHANGING = frozenset({"clusterIP", "clusterIPs"})


def _metadata(item: dict[str, Any]) -> dict[str, Any]:
    return {key: item["metadata"].get(key) for key in _METADATA}


def _told(item: dict[str, Any]) -> dict[str, Any]:
    parts = {str(key): item[key] for key in _PARTS if key in item}
    if "spec" in parts:
        parts["spec"] = {key: each for key, each in item["spec"].items() if key not in _CHANGING}
    owners = [(each["kind"], each["name"]) for each in item["metadata"]["ownerReferences"]]
    return {**_metadata(item), **parts, "owners": owners}


def spec(number: int) -> dict[str, Any]:
    sizes = ({"prefill": {"replicas": 1}}, {"prefill": {"replicas": 2}})
    engine = {"maxBatchedTokens": (256, 512)[number % 2]}
    return sample(decode={"replicas": 2}, engine=engine, **sizes[number % 2])


def begun(control_plane: ControlPlane, namespace: str, folder: Path, number: int) -> Operator:
    # A lease of its own for each, so that none waits for that of its dead predecessor.
    log = folder / f"operator-{number}.log"
    lease = f"--lease-name=operator-{number}"
    operator = Operator(
        control_plane.kubeconfig, namespace, log, lease, drain_seconds=DRAIN_SECONDS
    )
    operator.wait_started(leader=1)
    return operator


def test_an_operator_killed_at_any_point_of_a_rollout_comes_to_the_same_end(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    node: FakeNode,
    installed: None,
    tmp_path: Path,
) -> None:
    def rolled_out() -> None:
        stage.wait_until(stage.rolled_out, "rolled out")
        stage.wait_until(lambda: stage.settled(0.5), "no more writes")

    stage = Stage(kubectl, namespace, begun(control_plane, namespace, tmp_path, 0))
    try:
        stage.apply(spec(1))
        rolled_out()
        with changes_of(control_plane, namespace) as changes:
            undisturbed: list[dict[str, Any]] = []
            counts = []
            for number in range(2):
                changes.kill_at(0, stage.operator)
                stage.apply(spec(number))
                rolled_out()
                undisturbed.append(state(stage))
                counts.append(changes.seen)
            points = random.Random(7).sample(range(1, min(counts) * 4 // 5), KILLS)
            for number, point in enumerate(points):
                changes.kill_at(point, stage.operator)
                stage.apply(spec(number))
                wait_until(
                    lambda: not stage.operator.process.running,
                    f"killed at change {point} of about {counts}",
                    SECONDS,
                    stage.explain,
                )
                stage.operator = begun(control_plane, namespace, tmp_path, number + 1)
                rolled_out()
                assert state(stage) == undisturbed[number % 2], f"killed at change {point}"
        # Whatever was told to drain was told once, by whichever operator.
        assert set(stage.operator.told("drain").values()) == {1}
        assert not any(stage.operator.told("undrain").values())
        print(f"{KILLS} kills at changes {sorted(points)} of about {counts}")  # noqa: T201 - figures
    finally:
        stage.operator.process.kill()


def test_an_api_server_that_is_silent_in_the_middle_of_a_rollout_delays_it(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    node: FakeNode,
    installed: None,
    tmp_path: Path,
) -> None:
    log = tmp_path / "operator.log"
    lease = "--lease-seconds=90"
    operator = Operator(control_plane.kubeconfig, namespace, log, lease, drain_seconds=5)
    stage = Stage(kubectl, namespace, operator)
    try:
        operator.wait_started(leader=1)
        stage.apply(spec(0))
        stage.wait_until(stage.rolled_out, "rolled out")
        pid = operator.process.pid
        stage.apply(spec(1))
        stage.wait_until(lambda: bool(operator.told("drain")), "a worker drains")
        control_plane.api_server.pause()
        try:
            time.sleep(20)
            assert operator.process.running
        finally:
            control_plane.api_server.resume()
        begun = time.monotonic()
        stage.wait_until(stage.rolled_out, "rolled out")
        print(f"rolled out {time.monotonic() - begun:.1f} s after the silence")  # noqa: T201 - figures
        assert (operator.process.running, operator.process.pid) == (True, pid)
        # One prefill worker and two decode workers, each once.
        assert list(operator.told("drain").values()) == [1, 1, 1]
        assert stage.run("events", "--for=msvc/smollm2").count("DrainStarted") == 3
        assert "Traceback" not in operator.process.log
    finally:
        operator.process.kill()
