"""A real Kubernetes control plane as four processes: etcd, API server, controllers, scheduler.

Everything listens on one address, 127.0.0.1 unless nodes must reach it elsewhere, on free ports;
state lies in one folder. RBAC, node authorization, the default admission plugins (PodSecurity
among them) and NodeRestriction are on. The scheduler and the controllers act as users of their
own, as in a real cluster.
"""

import ipaddress
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.api import Access, ApiClient, ApiError, DisconnectedError
from cluster.binaries import CONTROL_PLANE, find_binaries
from cluster.certificates import Authority, Identity, new_private_key, write_private
from cluster.clients import Credentials, Kubectl, write_kubeconfig
from cluster.processes import Daemon, free_port, wait_until

_READY_TIMEOUT = 120.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ControlPlaneOptions:
    """What a real cluster's installer would ask."""

    address: str = _LOOPBACK
    service_cidr: str = "10.96.0.0/16"
    # Whether the service `kubernetes` gets an endpoint. One on loopback cannot be one.
    publish_endpoint: bool = False
    # How long a node may be silent before it counts as lost.
    node_grace_seconds: int = 40


@dataclass(frozen=True)
class Write:
    """A request that changes something; ``resource`` is a plural."""

    verb: str
    resource: str


class ControlPlane:
    """Starts on construction; `wait_ready` before use; `end` ends it. See `control_plane`."""

    def __init__(self, folder: Path, options: ControlPlaneOptions | None = None) -> None:
        self._folder = folder
        self._options = options or ControlPlaneOptions()
        self._binaries = find_binaries(CONTROL_PLANE)
        self.authority = Authority()
        self.url = f"https://{self._options.address}:{free_port(self._options.address)}"
        self._ca = folder / "ca.crt"
        self._ca.write_bytes(self.authority.certificate)
        self._admin = self.authority.issue("admin", ["system:masters"]).write(folder, "admin")
        self.kubectl = Kubectl(self.user_kubeconfig("admin", ["system:masters"]), folder)
        self._audit_log = folder / "audit.log"
        self._write_service_account_key()
        self.etcd, etcd_url = self._start_etcd()
        self.api_server = self._start_api_server(etcd_url)
        self.controller_manager = self._start_controller_manager()
        self.scheduler = self._start_scheduler()

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.kubectl.kubeconfig

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        return (self.scheduler, self.controller_manager, self.api_server, self.etcd)

    def client(self, timeout: float = 30.0) -> ApiClient:
        """A client with all rights."""
        return ApiClient(Access(self.url, self._ca, *self._admin), timeout)

    def user_kubeconfig(self, user: str, groups: list[str]) -> Path:
        """A kubeconfig with a certificate for `user`."""
        identity = self.authority.issue(user, groups)
        return write_kubeconfig(
            self._folder / f"{user.replace(':', '-')}.kubeconfig",
            self.url,
            self.authority.certificate,
            Credentials(identity.certificate, identity.key),
        )

    def wait_ready(self) -> None:
        """Until pods can be created: the API server is ready and namespaces get their accounts."""
        self.api_server.wait_until(lambda: self._answers("/readyz"), "ready", _READY_TIMEOUT)
        for daemon in (self.controller_manager, self.scheduler):
            if not daemon.running:  # it gave up: on a busy machine that took the API server longer
                daemon.start()
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until(
            lambda: self._answers(account),
            "service account default",
            _READY_TIMEOUT,
            self.controller_manager.tail,
        )

    def writes_of(self, user: str) -> list[Write]:
        """What a service account of a test changed so far, or tried to, in its order."""
        lines = self._audit_log.read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        return [
            Write(event["verb"], event["objectRef"]["resource"])
            for event in events
            if event["user"]["username"] == user
        ]

    def end(self) -> None:
        """At once: nothing that these processes would do on the way out matters here."""
        for daemon in self.daemons:
            daemon.kill()

    def _answers(self, path: str) -> bool:
        client = self.client(timeout=5.0)
        try:
            client.text(path)
        except (ApiError, DisconnectedError):
            return False
        finally:
            client.close()
        return True

    def _daemon(self, name: str, flags: dict[str, object]) -> Daemon:
        arguments = [f"--{flag}={value}" for flag, value in flags.items()]
        log = self._folder / f"{name}.log"
        return Daemon(name, [str(self._binaries[name]), *arguments], log)

    def _write_service_account_key(self) -> None:
        write_private(self._folder / "service-account.key", new_private_key())

    def _start_etcd(self) -> tuple[Daemon, str]:
        client, peer = (f"http://{_LOOPBACK}:{free_port()}" for _ in range(2))
        flags = {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",  # the state need not outlive the machine
            "log-level": "warn",
        }
        return self._daemon("etcd", flags), client

    def _start_api_server(self, etcd_url: str) -> Daemon:
        options = self._options
        service = str(next(ipaddress.ip_network(options.service_cidr).hosts()))
        hosts = [options.address, service, "localhost", "kubernetes.default.svc"]
        serving = self._identity("api-server", self.authority.issue("kube-apiserver", (), hosts))
        to_kubelet = self._identity(
            "kubelet-client", self.authority.issue("kube-apiserver", ["system:masters"])
        )
        signing_key = self._folder / "service-account.key"
        flags = {
            "etcd-servers": etcd_url,
            "bind-address": options.address,
            "advertise-address": options.address,
            "secure-port": self.url.rsplit(":", 1)[1],
            "tls-cert-file": serving[0],
            "tls-private-key-file": serving[1],
            "client-ca-file": self._ca,
            "kubelet-client-certificate": to_kubelet[0],
            "kubelet-client-key": to_kubelet[1],
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": signing_key,
            "service-account-signing-key-file": signing_key,
            "service-cluster-ip-range": options.service_cidr,
            "endpoint-reconciler-type": "lease" if options.publish_endpoint else "none",
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "shutdown-delay-duration": "0s",
            "audit-policy-file": self._audit_policy(),
            "audit-log-path": self._audit_log,
        }
        return self._daemon("kube-apiserver", flags)

    def _audit_policy(self) -> Path:
        """Writes of service accounts, but for those of the control plane itself."""
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
                {
                    "level": "Metadata",
                    "userGroups": ["system:serviceaccounts"],
                    "verbs": ["create", "update", "patch", "delete", "deletecollection"],
                },
            ],
        }
        path = self._folder / "audit-policy.json"
        path.write_text(json.dumps(policy), encoding="utf-8")
        return path

    def _start_controller_manager(self) -> Daemon:
        flags = {
            "kubeconfig": self.user_kubeconfig("system:kube-controller-manager", []),
            "root-ca-file": self._ca,
            "service-account-private-key-file": self._folder / "service-account.key",
            "use-service-account-credentials": "true",
            "node-monitor-grace-period": f"{self._options.node_grace_seconds}s",
            **_LONE_CONTROLLER,
        }
        return self._daemon("kube-controller-manager", flags)

    def _start_scheduler(self) -> Daemon:
        kubeconfig = self.user_kubeconfig("system:kube-scheduler", [])
        flags = {
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            **_LONE_CONTROLLER,
        }
        return self._daemon("kube-scheduler", flags)

    def _identity(self, name: str, identity: Identity) -> tuple[Path, Path]:
        return identity.write(self._folder, name)


# No rival to elect a leader against, no port of its own, and no throttle that tests would wait for.
_LONE_CONTROLLER: dict[str, object] = {
    "leader-elect": "false",
    "secure-port": 0,
    "kube-api-qps": 500,
    "kube-api-burst": 1000,
}


@contextmanager
def control_plane(
    folder: Path, options: ControlPlaneOptions | None = None
) -> Iterator[ControlPlane]:
    """A control plane that is ready; gone when the block ends."""
    plane = ControlPlane(folder, options)
    try:
        plane.wait_ready()
        yield plane
    finally:
        plane.end()
