"""The local plan and the next actions, as tables."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.operator.manifest import parse
from kvasir.operator.plan import (
    Action,
    Fail,
    Kill,
    LocalPlan,
    Machine,
    Observed,
    Process,
    Refused,
    Start,
    Stop,
    after_exit,
    after_start,
    next_actions,
    plan_local,
    restart_delay,
    revision,
)
from kvasir.router.config import RouterConfig
from kvasir.worker.config import WorkerConfig

HEAD = "apiVersion: kvasir.dev/v1alpha1\nkind: ModelService\nmetadata: {name: small}\n"
SOURCE = "model: {source: 'bundled://smollm2-135m-instruct'}"
MACHINE = Machine(cores=4, memory=16 * 1024**3)
DRAIN = 10.0


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
        ("model: {source: 'file:///a', quantization: int8}", "spec.model.quantization", "none"),
        ("engine: {type: vllm}", "spec.engine.type", "native"),
        ("engine: {speculative: {method: ngram}}", "spec.engine.speculative.method", "none"),
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
        (
            "router: {scaling: {minReplicas: 1, maxReplicas: 2}}",
            "spec.router.scaling",
            "spec.router.replicas",
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


PREFILL = Process("p", "prefill", {})
DECODE = Process("d", "decode", {})
ROUTER = Process("r", "router", {})
ALL = (PREFILL, DECODE, ROUTER)


def running(process: Process, since: float = 0.0, stopped_at: float | None = None) -> Observed:
    return Observed(process.id, process.role == "router", since, stop_requested_at=stopped_at)


def exited(process: Process, at: float, code: int = 1, crashes: int = 1) -> Observed:
    return Observed(process.id, process.role == "router", 0.0, at, code, crashes)


@pytest.mark.parametrize(
    ("desired", "observed", "now", "expected"),
    [
        pytest.param(ALL, [], 0, [Start("p"), Start("d"), Start("r")], id="nothing runs"),
        pytest.param(ALL, [running(p) for p in ALL], 5, [], id="all run"),
        pytest.param(ALL, [running(DECODE), running(ROUTER)], 5, [Start("p")], id="one missing"),
        pytest.param((DECODE,), [exited(DECODE, at=10)], 10.4, [], id="waits after a crash"),
        pytest.param((DECODE,), [exited(DECODE, at=10)], 10.5, [Start("d")], id="waited"),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, crashes=3)], 11.9, [], id="waits longer each time"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, crashes=3)], 12, [Start("d")], id="waited longer"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, code=0)], 11, [Start("d")], id="exit 0 is no excuse"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, code=-9)], 11, [Start("d")], id="killed by a signal"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, code=2)], 99, [Fail("d")], id="configuration error"
        ),
        pytest.param(
            ALL, [exited(DECODE, at=10, code=2)], 99, [Fail("d")], id="failure starts nothing"
        ),
        pytest.param(
            (DECODE, ROUTER),
            [running(p) for p in ALL],
            5,
            [Stop("p")],
            id="a surplus worker goes while the router stays",
        ),
        pytest.param((), [running(p) for p in ALL], 5, [Stop("r")], id="shutdown: router first"),
        pytest.param(
            (),
            [running(PREFILL), running(DECODE), running(ROUTER, stopped_at=5)],
            6,
            [],
            id="shutdown: workers wait for the router",
        ),
        pytest.param(
            (),
            [running(PREFILL), running(DECODE), exited(ROUTER, at=6, code=0)],
            6,
            [Stop("p"), Stop("d")],
            id="shutdown: then workers",
        ),
        pytest.param((), [running(DECODE, stopped_at=5)], 5 + DRAIN + 4.9, [], id="still has time"),
        pytest.param(
            (), [running(DECODE, stopped_at=5)], 5 + DRAIN + 5, [Kill("d")], id="out of time"
        ),
        pytest.param(
            (), [exited(DECODE, at=5)], 99, [], id="a crash during shutdown is left alone"
        ),
    ],
)
def test_next_actions(
    desired: tuple[Process, ...], observed: list[Observed], now: float, expected: list[Action]
) -> None:
    records = {record.id: record for record in observed}
    assert next_actions(desired, records, now, drain_deadline=DRAIN) == expected


def test_back_off_doubles_to_a_bound() -> None:
    delays = [restart_delay(crashes) for crashes in range(1, 9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay(10**6) == 30


def test_back_off_restarts_after_a_stable_minute() -> None:
    record = after_start(None, DECODE, 0.0)
    assert record.crashes == 0
    for expected in (1, 2, 3):
        record = after_exit(record, 1, record.started_at + 59)
        assert record.crashes == expected
        record = after_start(record, DECODE, 1000.0 * expected)
    record = after_exit(record, 1, record.started_at + 60)
    assert record.crashes == 1


@given(
    st.lists(st.sampled_from(["p", "d", "r"]), unique=True),
    st.lists(st.sampled_from(["crash", "tick"]), max_size=30),
)
def test_converges_from_anywhere(first: list[str], happenings: list[str]) -> None:
    """Whatever ran and crashed, carrying out the actions ends with exactly the desired set."""
    records = {p.id: running(p) for p in ALL if p.id in first}
    now = 0.0

    def carry_out(desired: tuple[Process, ...]) -> None:
        for action in next_actions(desired, records, now, drain_deadline=DRAIN):
            match action:
                case Start(id=name):
                    process = next(p for p in ALL if p.id == name)
                    assert name not in records or not records[name].running
                    records[name] = after_start(records.get(name), process, now)
                case Stop(id=name):
                    records[name] = after_exit(records[name], 0, now)

    for happening in happenings:
        now += 1.0
        if happening == "crash" and "d" in records and records["d"].running:
            records["d"] = after_exit(records["d"], 1, now)
        carry_out((DECODE, ROUTER))
    for _ in range(3):
        now += 60.0
        carry_out((DECODE, ROUTER))
    assert {name for name, record in records.items() if record.running} == {"d", "r"}
    for _ in range(3):
        now += 1.0
        carry_out(())
    assert not any(record.running for record in records.values())
