"""The local plan, as tables."""

from pathlib import Path

import pytest

from kvasir.operator.manifest import parse
from kvasir.operator.plan import LocalPlan, Machine, Refused, plan_local, revision
from kvasir.router.config import RouterConfig
from kvasir.worker.config import WorkerConfig

HEAD = "apiVersion: kvasir.dev/v1alpha1\nkind: ModelService\nmetadata: {name: small}\n"
SOURCE = "model: {source: 'bundled://smollm2-135m-instruct'}"
MACHINE = Machine(cores=4, memory=16 * 1024**3)


def plan(fields: str = "", machine: Machine = MACHINE) -> LocalPlan | Refused:
    service = parse(f"{HEAD}spec: {{{SOURCE}, {fields}}}")
    return plan_local(service, machine, port=8000, workers_file=Path("/state/workers.json"))


def planned(fields: str = "", machine: Machine = MACHINE) -> LocalPlan:
    result = plan(fields, machine)
    assert isinstance(result, LocalPlan)
    return result


def test_minimal() -> None:
    result = planned()
    assert [(process.id, process.role) for process in result.processes] == [
        ("small-prefill-0", "prefill"),
        ("small-decode-0", "decode"),
        ("small-router-0", "router"),
    ]
    assert result.notes == ()
    assert result.drain_deadline == 300.0


def test_processes_accept_their_configs() -> None:
    result = planned(
        "engine: {blockSize: 32, kvCacheMemory: 64Mi, maxBatchedTokens: 256, prefixCaching: false,"
        " maxRunningRequests: 7}, disaggregation: {mode: never, minUncachedTokens: 9},"
        " prefill: {replicas: 2}, decode: {replicas: 3}, rollout: {drainDeadline: 20s}"
    )
    *workers, router = result.processes
    configs = [WorkerConfig.model_validate(worker.config) for worker in workers]
    assert [config.worker_id for config in configs] == [worker.id for worker in workers]
    assert len({config.worker_id for config in configs}) == 5
    for config, worker in zip(configs, workers, strict=True):
        assert config.role == worker.role
        assert config.port == config.metrics_port == 0
        assert config.block_size == 32
        assert config.kv_cache_memory == 64 * 1024**2
        assert config.max_batched_tokens == 256
        assert config.max_running_requests == 7
        assert config.prefix_caching is False
        assert config.served_name == "small"
        assert config.drain_deadline == 20.0
    assert len({config.revision for config in configs}) == 1
    routed = RouterConfig.model_validate(router.config)
    assert routed.port == 8000
    assert routed.workers_file == Path("/state/workers.json")
    assert routed.disaggregation.mode == "never"
    assert routed.disaggregation.min_uncached_tokens == 9


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "threads"),
    [(1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 2), (8, 1, 1, 4), (8, 0, 1, 8), (2, 2, 2, 1)],
)
def test_threads(cores: int, prefill: int, decode: int, threads: int) -> None:
    result = planned(
        f"prefill: {{replicas: {prefill}}}, decode: {{replicas: {decode}}}",
        Machine(cores, MACHINE.memory),
    )
    assert {process.config["threads"] for process in result.processes[:-1]} == {threads}


@pytest.mark.parametrize(
    ("fields", "path", "instead"),
    [
        ("model: {source: 'hf://a/b'}", "spec.model.source", "file:///path"),
        ("model: {source: 'pvc://a/b'}", "spec.model.source", "file:///path"),
        ("model: {source: 'file:///a', quantization: fp8}", "spec.model.quantization", "int8"),
        ("engine: {type: vllm}", "spec.engine.type", "native"),
        ("prefill: {parallelism: {tensor: 2}}", "spec.prefill.parallelism.tensor", "use 1"),
        ("decode: {parallelism: {pipeline: 2}}", "spec.decode.parallelism.pipeline", "use 1"),
        (
            "prefill: {scaling: {minReplicas: 1, maxReplicas: 2}}",
            "spec.prefill.scaling",
            "spec.prefill.replicas",
        ),
        (
            "decode: {scaling: {minReplicas: 0, maxReplicas: 2}}",
            "spec.decode.scaling",
            "spec.decode.replicas",
        ),
        ("router: {replicas: 2}", "spec.router.replicas", "use 1"),
        ("decode: {replicas: 0}", "spec.decode.replicas", "1 or more"),
        ("decode: {replicas: 32}", "spec.prefill.replicas, spec.decode.replicas", "at most 32"),
        ("engine: {kvCacheMemory: 9Gi}", "spec.engine.kvCacheMemory", "smaller"),
    ],
)
def test_refused_here_though_valid(fields: str, path: str, instead: str) -> None:
    source = "" if fields.startswith("model:") else f"{SOURCE}, "
    service = parse(f"{HEAD}spec: {{{source}{fields}}}")
    result = plan_local(service, MACHINE, port=0, workers_file=Path("w"))
    assert isinstance(result, Refused)
    (problem,) = result.problems
    assert problem.startswith(f"{path}: ")
    assert instead in problem


def test_all_refusals_at_once() -> None:
    result = plan("engine: {type: vllm}, router: {replicas: 2}")
    assert isinstance(result, Refused)
    assert len(result.problems) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ("prefill: {resources: {limits: {cpu: 1}}}", "spec.prefill.resources"),
        ("decode: {accelerator: {resourceName: a.com/gpu}}", "spec.decode.accelerator"),
        ("router: {template: {}}", "spec.router.template"),
        ("objectives: {itlP95: 50ms}", "spec.objectives"),
    ],
)
def test_what_has_no_effect_here_is_noted(fields: str, named: str) -> None:
    (note,) = planned(fields).notes
    assert note.startswith(named)
    assert "no effect on the local runtime" in note


def test_revision_changes_with_model_and_engine_only() -> None:
    def of(fields: str) -> str:
        return revision(parse(f"{HEAD}spec: {{{SOURCE}, {fields}}}"))

    same = {of(""), of("decode: {replicas: 4}"), of("rollout: {drainDeadline: 1s}")}
    assert len(same) == 1
    assert of("engine: {blockSize: 32}") not in same
    assert len(of("")) == 10


def test_quantization_reaches_every_worker() -> None:
    model = "{source: 'file:///a', quantization: int8, activationQuantization: int8}"
    service = parse(f"{HEAD}spec: {{model: {model}}}")
    result = plan_local(service, MACHINE, port=0, workers_file=Path("w"))
    assert isinstance(result, LocalPlan)
    for process in result.processes[:-1]:
        worker = WorkerConfig.model_validate(process.config)
        assert (worker.quantization, worker.activation_quantization) == ("int8", "int8")
