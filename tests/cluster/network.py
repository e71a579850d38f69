"""The network of one test cluster: a bridge in a namespace of its own, nodes and the host on it.

Of a free 10.x.0.0/16 the first /24 is for the host (.1) and the nodes (.10 and up), 10.x.N.0/24
for the pods of node N (from 1), and 10.x.128.0/17 for services. The host reaches pods through
their nodes. Nothing is routed to anywhere else. The host keeps one device, which the kernel removes
with the namespace of the bridge.
"""

import ipaddress
import json
import os
from pathlib import Path

from cluster.namespaces import Namespaces, run

MOST_NODES = 8
_FIRST, _LAST = 200, 250


class Network:
    """Made on construction; `end` removes it."""

    def __init__(self, folder: Path) -> None:
        prefix = _free_prefix()
        self.host = f"{prefix}.0.1"
        self.service_cidr = f"{prefix}.128.0/17"
        self.pod_cidr = f"{prefix}.0.0/17"
        self._prefix = prefix
        self._device = f"kv{prefix.removeprefix('10.')}-{os.getpid()}"
        self._bridge = Namespaces("bridge", folder / "bridge.log")
        bridge = self._bridge
        bridge.run("ip", "link", "add", "br0", "type", "bridge")
        bridge.run("ip", "link", "set", "br0", "up")
        peer = ("peer", "name", "host", "netns", str(bridge.pid))
        run("ip", "link", "add", self._device, "type", "veth", *peer)
        bridge.run("ip", "link", "set", "host", "master", "br0", "up")
        run("ip", "address", "add", f"{self.host}/24", "dev", self._device)
        run("ip", "link", "set", self._device, "up")

    def address(self, number: int) -> str:
        """Of node `number`, from 1."""
        return f"{self._prefix}.0.{9 + number}"

    def pods(self, number: int) -> str:
        """The range of the pods of node `number`, from 1."""
        return f"{self._prefix}.{number}.0/24"

    def attach(self, node: Namespaces, number: int) -> None:
        """Connect node `number`, from 1."""
        bridge, port = self._bridge, f"node{number}"
        peer = ("peer", "name", port, "netns", str(bridge.pid))
        run("ip", "link", "add", "eth0", "netns", str(node.pid), "type", "veth", *peer)
        bridge.run("ip", "link", "set", port, "master", "br0", "up")
        node.run("ip", "link", "set", "lo", "up")
        node.run("ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")
        # A packet to a service needs some way out before it is given the address of a pod.
        node.run("ip", "route", "add", "default", "via", self.host)
        node.run("sysctl", "--quiet", "--write", "net.ipv4.ip_forward=1")
        run("ip", "route", "add", self.pods(number), "via", self.address(number))
        for other in range(1, MOST_NODES + 1):
            if other != number:
                node.run("ip", "route", "add", self.pods(other), "via", self.address(other))

    def end(self) -> None:
        self._bridge.end()


def _free_prefix() -> str:
    """The first two octets of a range that nothing on this machine uses."""
    taken = [
        ipaddress.ip_network(route["dst"])
        for route in json.loads(run("ip", "-json", "-4", "route"))
        if route["dst"] != "default"
    ]
    for octet in range(_FIRST, _LAST + 1):
        wanted = ipaddress.ip_network(f"10.{octet}.0.0/16")
        if not any(wanted.overlaps(network) for network in taken):
            return f"10.{octet}"
    raise AssertionError(f"every range from 10.{_FIRST} to 10.{_LAST} is in use on this machine")
