"""A node without containers: plays the kubelet for control-plane tests.

It registers a Node, renews its lease and its status, and reports each pod that the scheduler
binds to it as its rule says: Ready at once, by default. It removes deleted pods as a kubelet does.
Nothing runs in these pods; everything else (scheduling, endpoints, controllers) is real. It goes on
when the API server went away and came back, and sets right what controllers wrote while it was
thought lost.
"""

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count

from cluster.api import STRATEGIC_PATCH, ApiClient, ApiError, DisconnectedError, Object
from cluster.control_plane import ControlPlane
from cluster.pod_status import READY, Outcome, Rule, always, pod_status, says_ready
from cluster.processes import wait_until

_READY_TIMEOUT = 60.0
_RECONNECT_SECONDS = 0.2
_LEASE_SECONDS = 40
_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 20
_CAPACITY = {"cpu": "64", "memory": "800Gi", "pods": "500", "ephemeral-storage": "1Ti"}


class FakeNode:
    """One node; `capacity` adds to or replaces 64 CPUs, 256 GiB and 500 pods.

    Threads: one follows the pods, one acts on them, one renews lease and status. `rule` may be
    replaced from any thread.
    """

    def __init__(
        self, plane: ControlPlane, name: str, number: int, capacity: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self._number = 200 + number
        self.host = f"10.{self._number}.0.1"
        self._plane = plane
        self._capacity = {**_CAPACITY, **(capacity or {})}
        self._rule: Rule = always(READY)
        self._changed = threading.Condition()  # guards all that follows
        self._pods: dict[str, Object] = {}
        self._due: dict[str, float] = {}
        self._reported: dict[str, Outcome] = {}
        self._addresses: dict[str, str] = {}
        self._next_address = count(2)
        self._clients: list[ApiClient] = []
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        parts = (self._follow_pods, self._act_on_pods, self._beat)
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name=f"{name}{part.__name__}")
            for part in parts
        ]

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        with self._changed:
            self._rule = rule
            self._due |= dict.fromkeys(self._pods, 0.0)
            self._changed.notify()

    def start(self) -> None:
        """Register the node; returns when the scheduler may use it."""
        client = self._plane.client()
        client.create("/api/v1/nodes", self._node())
        lease = {
            "metadata": {"name": self.name},
            "spec": {"holderIdentity": self.name, "leaseDurationSeconds": _LEASE_SECONDS},
        }
        client.create(_LEASES, lease)
        self._report_node(client)
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self._schedulable(client), f"{self.name} schedulable", _READY_TIMEOUT)
        client.close()

    def stop(self) -> None:
        """The node falls silent, as if it lost power. Raises what broke it, if anything."""
        self._ended.set()
        with self._changed:
            self._changed.notify()
            clients = list(self._clients)
        for client in clients:
            client.interrupt()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def remove(self) -> None:
        """Stop, and take the Node away from the cluster."""
        self.stop()
        client = self._plane.client()
        client.delete(f"/api/v1/nodes/{self.name}")
        client.close()

    def _run(self, part: Callable[[ApiClient], None]) -> None:
        """Run a part until the end, over as many connections as it takes."""
        while not self._ended.is_set():
            client = self._plane.client()
            with self._changed:
                self._clients.append(client)
            try:
                part(client)
            except Exception as error:
                if not _passing(error):
                    self._failure = error
                    raise
                self._ended.wait(_RECONNECT_SECONDS)
            finally:
                with self._changed:
                    self._clients.remove(client)
                client.close()

    def _follow_pods(self, client: ApiClient) -> None:
        mine = f"spec.nodeName={self.name}"
        while not self._ended.is_set():
            found = client.get("/api/v1/pods", fieldSelector=mine)
            with self._changed:
                self._pods = {pod["metadata"]["uid"]: pod for pod in found["items"]}
                self._due = dict.fromkeys(self._pods, 0.0)
                self._changed.notify()
            events = client.watch(
                "/api/v1/pods",
                fieldSelector=mine,
                resourceVersion=found["metadata"]["resourceVersion"],
                timeoutSeconds=str(_WATCH_SECONDS),
            )
            for event in events:
                if self._ended.is_set() or event["type"] == "ERROR":
                    break
                self._see(event["type"], event["object"])

    def _see(self, kind: str, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        with self._changed:
            if kind == "DELETED":
                for known in (self._pods, self._due, self._reported, self._addresses):
                    known.pop(uid, None)
                return
            was = self._pods.get(uid)
            self._pods[uid] = pod
            # The time set for an end that is under way stays.
            if was is None or "deletionTimestamp" not in was["metadata"]:
                self._due[uid] = 0.0
                self._changed.notify()

    def _act_on_pods(self, client: ApiClient) -> None:
        while not self._ended.is_set():
            with self._changed:
                now = time.monotonic()
                due = [uid for uid, moment in self._due.items() if moment <= now]
                if not due:
                    self._changed.wait(min([*self._due.values(), now + 0.5]) - now)
                    continue
                work = [(uid, self._pods[uid], self._due.pop(uid)) for uid in due]
            for uid, pod, since in work:
                try:
                    self._act(client, uid, pod, since)
                except (ApiError, DisconnectedError):
                    self._postpone(uid, 0.0)
                    raise

    def _act(self, client: ApiClient, uid: str, pod: Object, since: float) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        try:
            if "deletionTimestamp" in metadata:
                self._end(client, path, uid, pod, since)
            elif pod["status"].get("phase") not in {"Succeeded", "Failed"}:
                self._report(client, path, uid, pod)
        except ApiError as error:
            if error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                raise  # otherwise it is gone, or another has its name: the watch will say so

    def _report(self, client: ApiClient, path: str, uid: str, pod: Object) -> None:
        outcome = self._rule(pod)
        if self._reported.get(uid) == outcome and says_ready(pod) == outcome.ready:
            return
        status = pod_status(pod, outcome, self.host, self._address(uid), _now())
        body = {"metadata": {"uid": uid}, "status": status}
        client.patch(f"{path}/status", body, STRATEGIC_PATCH)
        with self._changed:
            if uid in self._pods:
                self._reported[uid] = outcome

    def _end(self, client: ApiClient, path: str, uid: str, pod: Object, since: float) -> None:
        """At first set the time of the end, `since` being 0; at that time remove the pod."""
        grace = pod["metadata"]["deletionGracePeriodSeconds"]
        takes = min(self._rule(pod).stop_seconds, grace)
        if not since and takes:
            self._postpone(uid, time.monotonic() + takes)
            return
        client.delete(path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})

    def _postpone(self, uid: str, moment: float) -> None:
        with self._changed:
            if uid in self._pods:
                self._due.setdefault(uid, moment)

    def _address(self, uid: str) -> str:
        with self._changed:
            if uid not in self._addresses:
                high, low = divmod(next(self._next_address), 256)
                self._addresses[uid] = f"10.{self._number}.{high}.{low}"
            return self._addresses[uid]

    def _beat(self, client: ApiClient) -> None:
        """Keep the lease; and the status, which becomes Unknown when the lease was not kept."""
        while True:
            client.patch(f"{_LEASES}/{self.name}", {"spec": {"renewTime": _now(precise=True)}})
            self._report_node(client)
            if self._ended.wait(_BEAT_SECONDS):
                return

    def _report_node(self, client: ApiClient) -> None:
        status = {"status": self._node_status()}
        client.patch(f"/api/v1/nodes/{self.name}/status", status, STRATEGIC_PATCH)

    def _schedulable(self, client: ApiClient) -> bool:
        return not client.get(f"/api/v1/nodes/{self.name}")["spec"].get("taints")

    def _node(self) -> Object:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        return {"metadata": {"name": self.name, "labels": labels}}

    def _node_status(self) -> Object:
        healthy = [
            {"type": kind, "status": "False", "reason": "Played", "lastHeartbeatTime": _now()}
            for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
        ]
        ready = {"type": "Ready", "status": "True", "reason": "Played", "lastHeartbeatTime": _now()}
        return {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [{"type": "InternalIP", "address": self.host}],
            "conditions": [*healthy, ready],
        }


_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def _passing(error: Exception) -> bool:
    """Whether it may be well soon. An API server that starts answers 403 until its caches fill."""
    if isinstance(error, ApiError):
        return error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.status in {
            HTTPStatus.FORBIDDEN,
            HTTPStatus.TOO_MANY_REQUESTS,
        }
    return isinstance(error, DisconnectedError)


def _now(*, precise: bool = False) -> str:
    moment = datetime.datetime.now(datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if precise else "%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def fake_node(
    plane: ControlPlane,
    name: str = "fake-0",
    number: int = 0,
    capacity: dict[str, str] | None = None,
) -> Iterator[FakeNode]:
    """A node that is schedulable; removed when the block ends. `number` tells nodes apart."""
    node = FakeNode(plane, name, number, capacity)
    try:
        node.start()
        yield node
    finally:
        node.remove()
