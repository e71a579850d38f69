"""What a real API server refuses, and that the typed resources refuse the same.

Where the API server and the typed resources judge differently:

- a null: the API server drops it, so that the field counts as left out; the model refuses it, since
  in a file it is mostly a value that was forgotten;
- a whole number written with a fraction, 16.0: JSON makes no difference, YAML and the model do;
- an unknown field: refused under strict validation, which kubectl asks for; dropped otherwise.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from pydantic import ValidationError

from cluster.clients import CommandError, Kubectl
from cluster.control_plane import ControlPlane
from helpers.custom_resources import SOURCE, Services, install, service, services_in
from helpers.random_services import changed, changes
from kvasir.operator.modelservice import ModelService


@pytest.fixture(scope="module")
def installed(kubectl: Kubectl) -> None:
    install(kubectl)


@pytest.fixture
def services(control_plane: ControlPlane, namespace: str, installed: None) -> Iterator[Services]:
    with services_in(control_plane, namespace) as found:
        yield found


ONLY = {"minReplicas": 1}
BOUNDS = {"minReplicas": 2, "maxReplicas": 1}
INVALID: list[tuple[dict[str, Any], str]] = [
    # (spec beside the model, what the API server says)
    ({"engine": {"blokSize": 1}}, 'unknown field "spec.engine.blokSize"'),
    ({"replicas": 1}, 'unknown field "spec.replicas"'),
    ({"router": {"parallelism": {}}}, 'unknown field "spec.router.parallelism"'),
    ({"model": {}}, "spec.model.source: Required value"),
    ({"model": {"source": 3}}, "spec.model.source in body must be of type string"),
    ({"model": {"source": "smollm2"}}, 'spec.model.source: Invalid value: "smollm2": has no known'),
    ({"model": {"source": "s3://a/b"}}, "has no known scheme; write one of bundled://smollm2"),
    ({"model": {"source": "bundled://"}}, "malformed; write bundled://smollm2-135m-instruct"),
    ({"model": {"source": "hf://name"}}, "is incomplete or malformed; write hf://org/name"),
    ({"model": {"source": "pvc://claim"}}, "is incomplete or malformed; write pvc://claim/path"),
    ({"model": {"source": "file://x"}}, "is incomplete or malformed; write file:///absolute/path"),
    ({"model": {"source": f"file:///{'a' * 1024}"}}, "spec.model.source: Too long"),
    ({"model": {**SOURCE, "servedName": ""}}, 'spec.model.servedName: Invalid value: "": is not a'),
    ({"model": {**SOURCE, "servedName": "a b"}}, "is not a model name; use ASCII without spaces"),
    ({"model": {**SOURCE, "maxModelLen": 0}}, "spec.model.maxModelLen in body should be greater"),
    ({"model": {**SOURCE, "dtype": "fp16"}}, 'spec.model.dtype: Unsupported value: "fp16"'),
    ({"model": {**SOURCE, "quantization": "int3"}}, "spec.model.quantization: Unsupported value"),
    (
        {"model": {**SOURCE, "activationQuantization": "int8"}},
        "activationQuantization int8 needs quantization int8",
    ),
    ({"engine": []}, "spec.engine in body must be of type object"),
    ({"engine": {"type": "x"}}, 'spec.engine.type: Unsupported value: "x": supported values: "nat'),
    ({"engine": {"blockSize": 0}}, "spec.engine.blockSize in body should be greater than or equal"),
    ({"engine": {"blockSize": 2048}}, "spec.engine.blockSize in body should be less than or equal"),
    ({"engine": {"blockSize": True}}, "spec.engine.blockSize in body must be of type integer"),
    ({"engine": {"blockSize": 1.5}}, "spec.engine.blockSize in body must be of type integer"),
    ({"engine": {"maxBatchedTokens": "many"}}, "spec.engine.maxBatchedTokens in body must be of"),
    (
        {"engine": {"prefixCaching": "yes"}},
        "spec.engine.prefixCaching in body must be of type bool",
    ),
    ({"engine": {"speculative": {"method": "x"}}}, "spec.engine.speculative.method: Unsupported"),
    (
        {"engine": {"speculative": {"numSpeculativeTokens": 8}}},
        "spec.engine.speculative.numSpeculativeTokens: Invalid value: numSpeculativeTokens needs a "
        "method; set method to ngram or draft",
    ),
    (
        {"engine": {"kvCacheMemory": "1GB"}},
        'spec.engine.kvCacheMemory: Invalid value: "1GB": is not a size; write a size such as',
    ),
    ({"engine": {"kvCacheMemory": "0"}}, 'spec.engine.kvCacheMemory: Invalid value: "0": must be'),
    ({"engine": {"kvCacheMemory": "8Ei"}}, "must be from 1 to 1Pi"),
    ({"engine": {"kvCacheMemory": -1}}, "spec.engine.kvCacheMemory in body should be greater than"),
    ({"engine": {"kvCacheMemory": 1.5}}, "spec.engine.kvCacheMemory in body must be of type integ"),
    ({"disaggregation": {"mode": True}}, "spec.disaggregation.mode in body must be of type string"),
    (
        {"disaggregation": {"mode": "always"}, "prefill": {"replicas": 0}},
        "spec.prefill.replicas: Invalid value: disaggregation.mode always needs a prefill worker; "
        "set prefill.replicas to 1 or more",
    ),
    ({"prefill": {"replicas": -1}}, "spec.prefill.replicas in body should be greater than or eq"),
    ({"decode": {"replicas": 1025}}, "spec.decode.replicas in body should be less than or equal"),
    ({"router": {"replicas": 0}}, "spec.router.replicas in body should be greater than or equal"),
    (
        {"decode": {"replicas": 1, "scaling": {**ONLY, "maxReplicas": 2}}},
        "spec.decode.replicas: Invalid value: replicas and scaling exclude each other; remove one",
    ),
    (
        {"prefill": {"scaling": BOUNDS}},
        "spec.prefill.scaling.minReplicas: Invalid value: minReplicas is more than maxReplicas; "
        "raise maxReplicas or lower minReplicas",
    ),
    ({"router": {"scaling": BOUNDS}}, 'unknown field "spec.router.scaling"'),
    ({"decode": {"scaling": ONLY}}, "spec.decode.scaling.maxReplicas: Required value"),
    ({"decode": {"parallelism": {"tensor": 0}}}, "spec.decode.parallelism.tensor in body should"),
    ({"decode": {"accelerator": {"count": 1}}}, "spec.decode.accelerator.resourceName: Required"),
    (
        {"decode": {"accelerator": {"resourceName": "gpu"}}},
        'spec.decode.accelerator.resourceName: Invalid value: "gpu": is not an extended resource; '
        "write DOMAIN/NAME",
    ),
    (
        {"decode": {"resources": {"limits": {"cpu": "two"}}}},
        'spec.decode.resources.limits[cpu]: Invalid value: "two": is not an amount; write one such',
    ),
    (
        {"decode": {"resources": {"limits": {"cpu": 0.5}}}},
        "spec.decode.resources.limits.cpu in body",
    ),
    (
        {"decode": {"resources": {"limits": dict.fromkeys(map(str, range(17)), 1)}}},
        "spec.decode.resources.limits: Too many: 17: must have at most 16 items",
    ),
    ({"decode": {"template": "x"}}, "spec.decode.template in body must be of type object"),
    ({"objectives": {"ttftP95": 500}}, "spec.objectives.ttftP95 in body must be of type string"),
    (
        {"objectives": {"ttftP95": "fast"}},
        'spec.objectives.ttftP95: Invalid value: "fast": is not a duration; write a duration with '
        "its unit, such as 500ms",
    ),
    ({"objectives": {"itlP95": "0s"}}, 'spec.objectives.itlP95: Invalid value: "0s": must be from'),
    ({"rollout": {"drainDeadline": "-3s"}}, 'drainDeadline: Invalid value: "-3s": is not a durat'),
    ({"rollout": {"drainDeadline": "25h"}}, 'drainDeadline: Invalid value: "25h": must be from 1s'),
    # The largest duration of allowed length is one that CEL can still read.
    ({"rollout": {"drainDeadline": "999999h999999h9h"}}, "must be from 1s to 24h"),
]


def test_invalid_model_services_are_refused_by_field(services: Services) -> None:
    for spec, message in INVALID:
        assert message in services.refusal(service(spec))
        with pytest.raises(ValidationError):
            ModelService.model_validate(service(spec))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.b", 'metadata.name: Invalid value: "a.b": is not a DNS-1123 label; use lowercase'),
        ("a" * 41, "metadata.name: Too long: may not be more than 40"),
        ("A", "metadata.name: Invalid value"),
    ],
)
def test_invalid_names_are_refused(services: Services, name: str, message: str) -> None:
    assert message in services.refusal(service({}, name))


def test_kubectl_refuses_an_unknown_field_by_name(
    kubectl: Kubectl, namespace: str, installed: None
) -> None:
    document = service({"engine": {"blokSize": 1}})
    document["metadata"]["namespace"] = namespace
    for server_side in (False, True):
        with pytest.raises(
            CommandError,
            match=r'spec\.engine.*unknown field.*blokSize|unknown field "spec\.engine\.blokSize"',
        ):
            kubectl.apply(document, server_side=server_side)


def test_known_differences(services: Services) -> None:
    null = service({"engine": None, "decode": {"replicas": None, "parallelism": {"tensor": None}}})
    whole = service({"engine": {"blockSize": 16.0}}, "b")
    for document in (null, whole):
        with pytest.raises(ValidationError):
            ModelService.model_validate(document)
        stored = ModelService.model_validate(services.create(document))
        assert stored.spec == ModelService.model_validate(service({})).spec
    unknown = service({"engine": {"blokSize": 1}}, "c")
    with pytest.raises(ValidationError, match="blokSize"):
        ModelService.model_validate(unknown)
    assert "blokSize" not in services.create(unknown, strict=False)["spec"]["engine"]


@given(each=changes())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_services_are_judged_alike(
    services: Services, each: dict[tuple[str, ...], object]
) -> None:
    document = changed(each)
    try:
        read = ModelService.model_validate(document)
    except ValidationError as error:
        # CEL writes an entry of a map in brackets.
        message = re.sub(r"\[(\w+)\]", r".\1", services.refusal(document))
        places = {".".join(map(str, each["loc"])) for each in error.errors()}
        assert any(place in message for place in places), (message, places)
        event("refused")
        return
    event("accepted")
    stored = services.create(document)
    services.delete("a")
    again = ModelService.model_validate(stored)
    assert again.spec.model_dump(exclude=_TEMPLATES) == read.spec.model_dump(exclude=_TEMPLATES)


_TEMPLATES = {role: {"template"} for role in ("prefill", "decode", "router")}
"""Numbers in them may come back with fewer digits."""
