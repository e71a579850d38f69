"""What EndpointSlices say about workers."""

from typing import Any

import pytest

from kvasir.router.discovery import WorkerAddress
from kvasir.router.kube_discovery import workers_in


def endpoint(pod: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": pod},
    }


def endpoint_slice(
    *endpoints: dict[str, Any], name: str = "s", kind: str = "IPv4", port: str = "grpc"
) -> dict[str, Any]:
    ports = [{"name": "metrics", "port": 9400}, {"name": port, "port": 50051}]
    return {
        "metadata": {"name": name},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": ports,
    }


@pytest.mark.parametrize(
    ("conditions", "accepts"),
    [
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        # publishNotReadyAddresses makes also a terminating endpoint "ready".
        ({"ready": True, "serving": True, "terminating": True}, False),
        ({}, True),
    ],
)
def test_conditions_decide_whether_a_worker_accepts(
    conditions: dict[str, bool], accepts: bool
) -> None:
    found = workers_in([endpoint_slice(endpoint("w0", "10.0.0.1", **conditions))])
    assert found == (WorkerAddress("w0", "10.0.0.1:50051", accepts),)


def test_an_ipv6_address_is_in_brackets() -> None:
    (found,) = workers_in([endpoint_slice(endpoint("w0", "fd00::1"), kind="IPv6")])
    assert found.address == "[fd00::1]:50051"


def test_no_port_named_grpc_or_no_pod_is_no_worker() -> None:
    foreign = {"addresses": ["10.0.0.2"], "conditions": {}}
    assert workers_in([endpoint_slice(endpoint("w0", "10.0.0.1"), port="http")]) == ()
    assert workers_in([endpoint_slice(foreign)]) == ()
    assert workers_in([{**endpoint_slice(), "endpoints": None, "ports": None}]) == ()


@pytest.mark.parametrize("newest_first", [True, False])
def test_an_endpoint_in_two_slices_accepts_if_both_say_so(newest_first: bool) -> None:
    old = endpoint_slice(endpoint("w0", "10.0.0.1", ready=True), name="a")
    new = endpoint_slice(endpoint("w0", "10.0.0.1", ready=False, terminating=True), name="b")
    slices = [new, old] if newest_first else [old, new]
    assert workers_in(slices) == (WorkerAddress("w0", "10.0.0.1:50051", accepts=False),)


def test_ipv4_is_taken_of_two_addresses() -> None:
    slices = [
        endpoint_slice(endpoint("w0", "fd00::1"), name="a", kind="IPv6"),
        endpoint_slice(endpoint("w0", "10.0.0.1"), name="b"),
    ]
    assert workers_in(slices) == (WorkerAddress("w0", "10.0.0.1:50051"),)
