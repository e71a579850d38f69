"""A worker's refusal of its configuration, as the user of `kvasir up` reads it."""

from pathlib import Path

import pytest

from kvasir.operator.manifest import parse
from kvasir.operator.plan import LocalPlan, Machine, plan_local
from kvasir.operator.refusal import WORKER_FIELDS, in_terms_of_the_spec

MINIMAL = """
apiVersion: kvasir.dev/v1alpha1
kind: ModelService
metadata: {name: small}
spec: {model: {source: 'bundled://smollm2-135m-instruct'}}
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "kvasir-worker: model: /m/block_size does not exist; correct the path",
            "spec.model.source: /m/block_size does not exist; correct the path",
        ),
        (
            "kvasir-worker: max_model_len: 9000 is beyond the model's 2048 tokens; "
            "set it to at most 2048",
            "spec.model.maxModelLen: 9000 is beyond the model's 2048 tokens; "
            "set it to at most 2048",
        ),
        (
            "kvasir-worker: dtype: float16 is not supported on a CPU; set dtype to auto",
            "spec.model.dtype: float16 is not supported on a CPU; set dtype to auto",
        ),
        (
            "kvasir-worker: kv_cache_memory: 1048576 bytes cannot hold one sequence of "
            "max_model_len 2048 tokens; set it to at least 47185921, or lower max_model_len",
            "spec.engine.kvCacheMemory: 1 MiB cannot hold one sequence of "
            "spec.model.maxModelLen 2048 tokens; set it to at least 46Mi, or lower "
            "spec.model.maxModelLen",
        ),
        (
            "kvasir-worker: kv_cache_memory: 1073741824 bytes and 538060800 bytes of weights "
            "exceed the 1000000000 bytes free on cpu; lower kv_cache_memory or use a smaller model",
            "spec.engine.kvCacheMemory: 1 GiB and 513.1 MiB of weights exceed the 953.7 MiB "
            "free on cpu; lower spec.engine.kvCacheMemory or use a smaller model",
        ),
        (
            "kvasir-router: cannot listen on 127.0.0.1:80: choose another host or port",
            "cannot listen on 127.0.0.1:80: choose another host or port",
        ),
        (
            "kvasir-worker: device: no CUDA device is usable; set device to auto or cpu",
            "device: no CUDA device is usable; set device to auto or cpu",
        ),
        ("/m/config.json: not valid JSON", "/m/config.json: not valid JSON"),
        ("", ""),
    ],
)
def test_known_names_become_paths_of_the_spec(message: str, expected: str) -> None:
    assert in_terms_of_the_spec(message) == expected


def test_the_names_are_those_of_the_plan_and_of_the_resource() -> None:
    service = parse(MINIMAL)
    plan = plan_local(service, Machine(4, 2**34), port=1, workers_file=Path("w"))
    assert isinstance(plan, LocalPlan)
    resource = service.model_dump(by_alias=True)
    for field, path in WORKER_FIELDS.items():
        assert field in plan.processes[0].config
        part = resource
        for name in path.split("."):
            part = part[name]
