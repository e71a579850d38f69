"""The objects of routers in a cluster."""

from typing import Any

import pytest

from helpers.cluster_service import INSTALLATION, a_service
from kvasir.operator.cluster import objects
from kvasir.router.config import RouterConfig


def test_a_routers_configuration_is_one_that_it_accepts() -> None:
    service = a_service(
        disaggregation={"mode": "always", "minUncachedTokens": 9}, rollout={"drainDeadline": "60s"}
    )
    (config_map,) = [
        each for each in objects.shared(service, INSTALLATION) if each["kind"] == "ConfigMap"
    ]
    config = RouterConfig.model_validate_json(config_map["data"]["router.json"])
    assert config.kubernetes is not None
    assert (config.kubernetes.namespace, config.kubernetes.service) == ("team", "chat-workers")
    assert (config.port, config.drain_linger, config.drain_deadline) == (8000, 5.0, 60.0)
    assert (config.disaggregation.mode, config.disaggregation.min_uncached_tokens) == ("always", 9)


@pytest.mark.parametrize(
    ("decode", "seconds"),
    [
        ({"replicas": 1}, 30.0),
        ({"scaling": {"minReplicas": 0, "maxReplicas": 2}}, 300.0),
        # As long, so that a change of the bounds restarts no router.
        ({"scaling": {"minReplicas": 1, "maxReplicas": 2}}, 300.0),
    ],
)
def test_routers_hold_requests_for_longer_where_workers_start_for_them(
    decode: dict[str, Any], seconds: float
) -> None:
    service = a_service(decode=decode)
    (config_map,) = [
        each for each in objects.shared(service, INSTALLATION) if each["kind"] == "ConfigMap"
    ]
    config = RouterConfig.model_validate_json(config_map["data"]["router.json"])
    assert config.no_worker_timeout == seconds


def test_a_router_is_ready_without_workers_and_leaves_slowly() -> None:
    template = objects.router_deployment(a_service(), INSTALLATION, 3, "a1")["spec"]["template"]
    (main,) = template["spec"]["containers"]
    assert main["readinessProbe"]["httpGet"]["path"] == "/health"
    # It lingers by itself.
    assert "lifecycle" not in main
    assert template["spec"]["terminationGracePeriodSeconds"] == 5 + 300 + 15
    assert "--set=host=*" in main["args"]


def test_a_changed_router_configuration_restarts_routers_and_replicas_do_not() -> None:
    def template(replicas: int, **spec: Any) -> Any:
        made = objects.router_deployment(a_service(**spec), INSTALLATION, replicas, "a1")
        return made["spec"]["template"]

    assert template(1) == template(5)
    assert template(1) != template(1, disaggregation={"mode": "never"})


def test_a_router_may_read_endpoint_slices_and_nothing_else() -> None:
    (role,) = [e for e in objects.shared(a_service(), INSTALLATION) if e["kind"] == "Role"]
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
