"""ModelService files: what is accepted, and what each mistake is told."""

from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvasir.operator.manifest import ManifestError, load, parse
from kvasir.operator.modelservice import Accelerator, ModelService, Parallelism, Scaling

ROOT = Path(__file__).resolve().parents[2]
HEAD = "apiVersion: kvasir.dev/v1alpha1\nkind: ModelService\nmetadata: {name: smollm2}\n"
SOURCE = "model: {source: 'bundled://smollm2-135m-instruct'}"

# Every field of the contract.
FULL = """
apiVersion: kvasir.dev/v1alpha1
kind: ModelService
metadata: {name: smollm2, namespace: default, labels: {team: a}, annotations: {note: "x"}}
spec:
  model:
    source: hf://org/name@main
    servedName: org/small
    maxModelLen: 4096
    dtype: bfloat16
    quantization: int8
  engine:
    type: vllm
    blockSize: 32
    kvCacheMemory: 1.5Gi
    maxBatchedTokens: 1024
    maxRunningRequests: 8
    prefixCaching: false
    speculative: {method: ngram}
  disaggregation: {mode: always, minUncachedTokens: 128}
  prefill:
    scaling: {minReplicas: 1, maxReplicas: 4}
    parallelism: {tensor: 2, pipeline: 1}
    resources: {requests: {cpu: 2, memory: 4Gi}, limits: {memory: 8Gi}}
    accelerator: {resourceName: amd.com/gpu, count: 2}
    template: {spec: {nodeSelector: {disk: fast}}}
  decode: {replicas: 3}
  router: {replicas: 2}
  objectives: {ttftP95: 500ms, itlP95: 50ms}
  rollout: {drainDeadline: 5m}
"""


def spec(text: str) -> str:
    return f"{HEAD}spec: {{{SOURCE}, {text}}}\n"


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return caught.value.problems


def test_every_field() -> None:
    service = parse(FULL)
    assert service.name == "smollm2"
    assert service.served_name == "org/small"
    assert service.spec.engine.kv_cache_memory == 3 * 512 * 1024**2
    assert service.spec.prefill.scaling == Scaling.model_validate(
        {"minReplicas": 1, "maxReplicas": 4}
    )
    assert service.spec.prefill.parallelism == Parallelism(tensor=2)
    assert service.spec.prefill.accelerator == Accelerator.model_validate(
        {"resourceName": "amd.com/gpu", "count": 2}
    )
    assert service.spec.objectives.ttft_p95 == 0.5
    assert service.spec.rollout.drain_deadline == 300.0


def test_defaults() -> None:
    service = parse(f"{HEAD}spec: {{{SOURCE}}}")
    assert service.served_name == "smollm2"
    assert service.spec.model.max_model_len == 2048
    assert service.spec.engine.kv_cache_memory == 512 * 1024**2
    assert service.spec.engine.block_size == 16
    assert service.spec.engine.prefix_caching is True
    assert service.spec.engine.speculative.most_tokens == 8
    assert service.spec.disaggregation.mode == "auto"
    assert [
        service.spec.prefill.initial_replicas,
        service.spec.decode.initial_replicas,
        service.spec.router.initial_replicas,
    ] == [1, 1, 1]
    assert service.spec.rollout.drain_deadline == 300.0


@pytest.mark.parametrize("sample", sorted((ROOT / "deploy" / "samples").glob("*.yaml")), ids=str)
def test_samples_are_valid(sample: Path) -> None:
    assert load(sample).name


@pytest.mark.parametrize(
    "source",
    [
        "bundled://smollm2-135m-instruct",
        "hf://org/name",
        "hf://org/name@refs/pr/1",
        "hf://Org-1/name_2.5B@abcdef0",
        "pvc://claim/path/to/model",
        "file:///models/llama",
        "file:///with space/model.gguf",
    ],
)
def test_sources(source: str) -> None:
    service = parse(f"{HEAD}spec: {{model: {{source: '{source}'}}}}")
    assert service.spec.model.source == source


def test_output_of_an_api_server_is_accepted() -> None:
    extra = (
        "metadata: {name: smollm2, generateName: s, uid: 1-2, resourceVersion: '5', generation: 2, "
        "creationTimestamp: 2026-01-01T00:00:00Z, managedFields: [{manager: kubectl}]}"
    )
    text = HEAD.replace("metadata: {name: smollm2}", extra)
    assert parse(f"{text}spec: {{{SOURCE}}}\nstatus: {{conditions: []}}").name == "smollm2"


def test_merge_keys_and_anchors_are_plain_yaml() -> None:
    text = spec("decode: &role {replicas: 2}, prefill: {<<: *role, replicas: 1}")
    service = parse(text)
    assert service.spec.decode.replicas == 2
    assert service.spec.prefill.replicas == 1


def test_an_empty_document_beside_it_does_not_matter() -> None:
    assert parse(f"---\n{HEAD}spec: {{{SOURCE}}}\n---\n").name == "smollm2"


def test_objects_are_immutable() -> None:
    service = parse(FULL)
    with pytest.raises(ValidationError, match="frozen"):
        service.spec.engine.block_size = 8


def test_all_problems_at_once() -> None:
    text = spec("engine: {blokSize: 1, kvCacheMemory: 5x}, decode: {replicas: '1'}")
    assert problems(text) == (
        "spec.engine.kvCacheMemory: '5x' is not a size; write a size such as 512Mi, 1Gi or 1.5G",
        "spec.engine.blokSize: unknown field; did you mean blockSize?",
        "spec.decode.replicas: must be a whole number, got '1'",
    )


INVALID_SPECS = [
    # (spec fields, path, a part of the message)
    ("engine: {blokSize: 8}", "spec.engine.blokSize", "did you mean blockSize?"),
    ("engine: {block_size: 8}", "spec.engine.block_size", "did you mean blockSize?"),
    ("engine: {xyz: 8}", "spec.engine.xyz", "the fields here are type, blockSize"),
    ("blockSize: 8", "spec.blockSize", "it belongs at spec.engine.blockSize"),
    ("replicas: 2", "spec.replicas", "spec.prefill.replicas or spec.decode.replicas"),
    ("decod: {replicas: 2}", "spec.decod", "did you mean decode?"),
    ("router: {parallelism: {}}", "spec.router.parallelism", "it belongs at"),
    ("engine: {blockSize: 0}", "spec.engine.blockSize", "at least 1, got 0"),
    ("engine: {blockSize: 2048}", "spec.engine.blockSize", "at most 1024, got 2048"),
    ("engine: {blockSize: 16.0}", "spec.engine.blockSize", "whole number, got 16.0"),
    ("engine: {blockSize: true}", "spec.engine.blockSize", "whole number, got true"),
    ("engine: {blockSize: }", "spec.engine.blockSize", "whole number, got nothing"),
    ("engine: {kvCacheMemory: 0}", "spec.engine.kvCacheMemory", "from 1 to 1Pi"),
    ("engine: {kvCacheMemory: 1GB}", "spec.engine.kvCacheMemory", "'1GB' is not a size"),
    ("engine: {kvCacheMemory: -1}", "spec.engine.kvCacheMemory", "-1 is not a size"),
    ("engine: {kvCacheMemory: 1.5}", "spec.engine.kvCacheMemory", "must be a size"),
    ("engine: {kvCacheMemory: true}", "spec.engine.kvCacheMemory", "must be a size"),
    ("engine: {maxBatchedTokens: many}", "spec.engine.maxBatchedTokens", "got 'many'"),
    ("engine: {maxRunningRequests: 0}", "spec.engine.maxRunningRequests", "at least 1"),
    ("engine: {prefixCaching: 'yes'}", "spec.engine.prefixCaching", "true or false, got 'yes'"),
    ("engine: {prefixCaching: 1}", "spec.engine.prefixCaching", "true or false, got 1"),
    ("engine: {type: sglang}", "spec.engine.type", "one of native, vllm"),
    ("engine: {type: nativ}", "spec.engine.type", "did you mean native?"),
    ("engine: {speculative: ngram}", "spec.engine.speculative", "a mapping of fields"),
    ("engine: {speculative: {method: x}}", "spec.engine.speculative.method", "one of none"),
    (
        "engine: {speculative: {numSpeculativeTokens: 33}}",
        "spec.engine.speculative.numSpeculativeTokens",
        "at most 32",
    ),
    (
        "engine: {speculative: {numSpeculativeTokens: 4}}",
        "spec.engine.speculative",
        "numSpeculativeTokens needs a method; set method to ngram or draft, or remove",
    ),
    (
        "engine: {speculative: {method: none, numSpeculativeTokens: 8}}",
        "spec.engine.speculative",
        "numSpeculativeTokens needs a method",
    ),
    ("engine: []", "spec.engine", "a mapping of fields, got a list"),
    ("engine: ", "spec.engine", "a mapping of fields, got nothing"),
    ("disaggregation: {mode: on}", "spec.disaggregation.mode", "got true"),
    ("disaggregation: {mode: alwys}", "spec.disaggregation.mode", "did you mean always?"),
    (
        "disaggregation: {minUncachedTokens: 0}",
        "spec.disaggregation.minUncachedTokens",
        "at least 1",
    ),
    ("disaggregation: {mode: always}, prefill: {replicas: 0}", "spec", "prefill.replicas"),
    ("prefill: {replicas: -1}", "spec.prefill.replicas", "at least 0"),
    ("decode: {replicas: 100000}", "spec.decode.replicas", "at most 1024"),
    ("decode: {replicas: 99999999999999999999}", "spec.decode.replicas", "at most 1024"),
    ("router: {replicas: 0}", "spec.router.replicas", "at least 1"),
    (
        "decode: {replicas: 1, scaling: {minReplicas: 1, maxReplicas: 2}}",
        "spec.decode",
        "exclude each other",
    ),
    (
        "decode: {scaling: {minReplicas: 3, maxReplicas: 2}}",
        "spec.decode.scaling",
        "minReplicas is more than maxReplicas",
    ),
    ("decode: {scaling: {minReplicas: 1}}", "spec.decode.scaling.maxReplicas", "required"),
    ("decode: {parallelism: {tensor: 0}}", "spec.decode.parallelism.tensor", "at least 1"),
    ("decode: {accelerator: {count: 1}}", "spec.decode.accelerator.resourceName", "required"),
    (
        "decode: {accelerator: {resourceName: gpu}}",
        "spec.decode.accelerator.resourceName",
        "'gpu' is not an extended resource",
    ),
    (
        "router: {scaling: {minReplicas: 1, maxReplicas: 2}}",
        "spec.router.scaling",
        "it belongs at spec.prefill.scaling or spec.decode.scaling",
    ),
    (
        "decode: {scaling: {minReplicas: 1, maxReplicas: 2, stabilizationWindow: 1s}}",
        "spec.decode.scaling.stabilizationWindow",
        "10s",
    ),
    ("decode: {resources: {limits: {cpu: 0.5}}}", "spec.decode.resources.limits.cpu", '"0.5"'),
    ("decode: {resources: {limits: {cpu: -1}}}", "spec.decode.resources.limits.cpu", "amount"),
    ("decode: {resources: {limits: {cpu: x}}}", "spec.decode.resources.limits.cpu", "amount"),
    (
        f"decode: {{resources: {{limits: {dict.fromkeys(map(str, range(17)), 1)}}}}}",
        "spec.decode.resources.limits",
        "at most 16",
    ),
    ("decode: {template: text}", "spec.decode.template", "a mapping of names to values"),
    ("objectives: {ttftP95: 500}", "spec.objectives.ttftP95", "500 has no unit"),
    ("objectives: {ttftP95: fast}", "spec.objectives.ttftP95", "'fast' is not a duration"),
    ("objectives: {itlP95: 0s}", "spec.objectives.itlP95", "from 1ms to 1h, got '0s'"),
    ("objectives: {ttftp95: 1s}", "spec.objectives.ttftp95", "did you mean ttftP95?"),
    ("rollout: {drainDeadline: 300}", "spec.rollout.drainDeadline", "300 has no unit"),
    ("rollout: {drainDeadline: 0s}", "spec.rollout.drainDeadline", "from 1s to 24h, got '0s'"),
    ("rollout: {drainDeadline: 25h}", "spec.rollout.drainDeadline", "from 1s to 24h"),
    ("rollout: {drainDeadline: 1s1s1s1s1s1s1s1s1s}", "spec.rollout.drainDeadline", "at most 16"),
    ("rollout: {drainDeadline: -3s}", "spec.rollout.drainDeadline", "is not a duration"),
    ("1: 2", "spec.1", "field names are text"),
]


@pytest.mark.parametrize(("fields", "path", "message"), INVALID_SPECS)
def test_invalid_spec(fields: str, path: str, message: str) -> None:
    (problem,) = problems(spec(fields))
    assert problem.startswith(f"{path}: ")
    assert message in problem


INVALID_MODELS = [
    ("{}", "spec.model.source", "add 'source: bundled://smollm2-135m-instruct'"),
    ("{source: smollm2}", "spec.model.source", "no known scheme"),
    ("{source: 's3://bucket/x'}", "spec.model.source", "no known scheme"),
    ("{source: 'bundled://'}", "spec.model.source", "write bundled://smollm2-135m-instruct"),
    ("{source: 'hf://name'}", "spec.model.source", "write hf://org/name"),
    ("{source: 'hf://a/b/c'}", "spec.model.source", "write hf://org/name"),
    ("{source: 'pvc://claim'}", "spec.model.source", "write pvc://claim/path"),
    ("{source: 'file://models/x'}", "spec.model.source", "write file:///absolute/path"),
    ("{source: 3}", "spec.model.source", "must be text"),
    ("{source: 'file:///x', servedName: ''}", "spec.model.servedName", "not a model name"),
    ("{source: 'file:///x', servedName: 'a b'}", "spec.model.servedName", "without spaces"),
    ("{source: 'file:///x', maxModelLen: 0}", "spec.model.maxModelLen", "at least 1"),
    ("{source: 'file:///x', dtype: fp16}", "spec.model.dtype", "one of auto, float32"),
    ("{source: 'file:///x', dtype: bfloat}", "spec.model.dtype", "did you mean bfloat16?"),
    ("{source: 'file:///x', quantization: int3}", "spec.model.quantization", "did you mean int"),
    (
        "{source: 'file:///x', quantization: int4, activationQuantization: int8}",
        "spec.model",
        "activationQuantization int8 needs quantization int8",
    ),
]


@pytest.mark.parametrize(("model", "path", "message"), INVALID_MODELS)
def test_invalid_model(model: str, path: str, message: str) -> None:
    (problem,) = problems(f"{HEAD}spec: {{model: {model}}}")
    assert problem.startswith(f"{path}: ")
    assert message in problem


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Smol", "DNS-1123"),
        ("a_b", "DNS-1123"),
        ("-a", "DNS-1123"),
        ("a-", "DNS-1123"),
        ("a.b", "DNS-1123"),
        ("''", "DNS-1123"),
        ("../../etc", "DNS-1123"),
        ('"a\\n"', "DNS-1123"),
        ("a" * 41, "at most 40"),
        ("12", "put it in quotes"),
    ],
)
def test_invalid_name(name: str, message: str) -> None:
    text = HEAD.replace("name: smollm2", f"name: {name}") + f"spec: {{{SOURCE}}}"
    (problem,) = problems(text)
    assert problem.startswith("metadata.name: ")
    assert message in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# nothing\n---\n", "empty"),
        ("text", "not a mapping but 'text'"),
        ("[1]", "not a mapping but a list"),
        ("a: [", "line 1: not valid YAML"),
        ("a: b\n\tc: d", "line 2: not valid YAML"),
        (f"{HEAD}kind: ModelService\n", "line 4: kind is given twice; remove one"),
        (f"{HEAD}spec:\n  model: {{}}\n  model: {{}}\n", "line 6: model is given twice"),
        (f"{HEAD}---\n{HEAD}", "holds 2 documents"),
        ("a: !!python/object/apply:os.getcwd []", "line 1: not valid YAML"),
        ("? [a, b]\n: c", "line 1: not valid YAML"),
        ("a: 2026-99-99", "put such text in quotes"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: \x07", "not valid YAML"),
        ("kind: ModelService", "apiVersion: required but missing"),
        (HEAD, "spec: required but missing"),
        (f"{HEAD}spec: {{}}", "spec.model: required but missing"),
        (f"{HEAD}spec: 3", "spec: must be a mapping of fields, got 3"),
        (HEAD.replace("v1alpha1", "v1"), "apiVersion: must be kvasir.dev/v1alpha1, got"),
        (HEAD.replace("ModelService", "Pod"), "kind: must be ModelService, got 'Pod'"),
        (f"{HEAD}sepc: {{}}", "sepc: unknown field; did you mean spec?"),
        (HEAD.replace("{name: smollm2}", "{}"), "metadata.name: required but missing"),
        (HEAD.replace("name:", "labels: {a: 1}, name:"), "metadata.labels.a: must be text"),
    ],
)
def test_invalid_document(text: str, expected: str) -> None:
    assert any(problem.startswith(expected) or expected in problem for problem in problems(text))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES = st.sampled_from(
    [
        *("apiVersion", "metadata", "metadata.name", "metadata.labels", "spec", "spec.model"),
        *("spec.model.source", "spec.engine", "spec.engine.kvCacheMemory", "spec.prefill"),
        *("spec.prefill.scaling", "spec.prefill.template", "spec.objectives.ttftP95", "spec.x"),
    ]
)


@settings(deadline=None)
@given(PLACES, VALUES)
def test_any_value_anywhere_is_read_or_explained(place: str, value: object) -> None:
    document = yaml.safe_load(FULL)
    *parents, name = place.split(".")
    target = document
    for parent in parents:
        target = target[parent]
    target[name] = value
    text = yaml.safe_dump(document, allow_unicode=True)
    with suppress(ManifestError):
        assert parse(text).spec


@given(st.text())
def test_any_text_is_read_or_explained(text: str) -> None:
    with suppress(ManifestError):
        parse(text)


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("\ufeff" + FULL)  # some editors begin files with a byte order mark
    assert isinstance(load(good), ModelService)

    binary, large = tmp_path / "binary.yaml", tmp_path / "large.yaml"
    binary.write_bytes(b"\x80\x81\xff")
    large.write_text("#" * 1024**2 + "\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text(spec("engine: {blokSize: 1}"))
    for path, message in (
        (tmp_path / "absent.yaml", "no such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "not a text file"),
        (large, "larger than 1 MiB"),
        (bad, "spec.engine.blokSize: unknown field"),
    ):
        with pytest.raises(ManifestError) as caught:
            load(path)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{path}: {message}")
