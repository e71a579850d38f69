"""What the loader refuses, and that each refusal names the field and the fix."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.models import load, save_tiny
from kvasir.worker import loader
from kvasir.worker.config import WorkerConfig
from kvasir.worker.kernels.library import Unavailable, find_kernels
from kvasir.worker.loader import ModelError, load_model
from kvasir.worker.model.source import named_as


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    return tmp_path


def refusal(model: str, **fields: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(model, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = dict(load_file(path)) | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def test_progress_and_what_is_said_of_the_model(folder: Path) -> None:
    lines: list[str] = []
    config = WorkerConfig(
        worker_id="w",
        model=f"file://{folder}",
        dtype="bfloat16",
        device="cpu",
        threads=1,
        block_size=8,
        max_model_len=100,
        kv_cache_memory=100_000,
    )
    loaded = load_model(config, lines.append)
    assert lines[0] == f"opening file://{folder}"
    assert "reading weights 49 of 51" in lines
    assert "reading weights 51 of 51" in lines
    assert loaded.max_model_len == 100
    assert loaded.vocab_size == 160
    assert loaded.eos_token_ids == {2}
    # 3 layers, K and V, 8 tokens, 2 heads of 8, 2 bytes.
    assert loaded.runner.block_bytes == 3 * 2 * 8 * 2 * 8 * 2
    assert loaded.runner.num_blocks == 100_000 // loaded.runner.block_bytes
    assert loaded.layout.dtype == "bfloat16"
    assert (loaded.layout.num_layers, loaded.layout.num_kv_heads, loaded.layout.head_dim) == (
        3,
        2,
        8,
    )


def test_the_log_says_what_computes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(f"file://{folder}", dtype="float32", quantization="int8", threads=1)
    assert "computes with=torch dtype=float32 quantization=int8 speculation=none threads=1" in [
        record.getMessage() for record in caplog.records
    ]


def test_fingerprint_follows_the_weights_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = load(f"file://{folder}").layout.model_fingerprint
    moved = folder.parent / f"{folder.name}-moved"
    folder.rename(moved)
    assert load(f"file://{moved}").layout.model_fingerprint == first
    edit_weights(moved, model__norm__weight=torch.ones(48))
    assert load(f"file://{moved}").layout.model_fingerprint != first


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("bundled://nothing", "no bundled model is named 'nothing'; use one of smollm2-135m"),
        ("file:///nowhere/at/all", "/nowhere/at/all does not exist; correct the path"),
        ("hf://org/name", "not a model URL; use bundled://NAME or file:///PATH"),
        ("file://relative/path", "not a model URL; use bundled://NAME or file:///PATH"),
    ],
)
def test_wrong_urls(model: str, said: str) -> None:
    message = refusal(model)
    assert message.startswith("model: ")
    assert said in message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("pvc://claim/a%20b/", "model: pvc://claim/a%20b has no config.json"),
        ("", "model: {path} has no config.json"),
    ],
)
def test_a_refusal_names_what_people_call_the_model(tmp_path: Path, source: str, said: str) -> None:
    mounted = tmp_path / "a%20b"
    mounted.mkdir()
    url = f"file://{tmp_path}/a%2520b/"
    message = named_as(source, url, refusal(url))
    assert message.startswith(said.format(path=mounted))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really, only a few bytes")
    (tmp_path / "empty.gguf").touch()
    assert "neither a .gguf file nor a folder" in refusal(f"file://{tmp_path}/notes.txt")
    assert "has no config.json" in refusal(f"file://{tmp_path}")
    for name in ("broken", "empty"):
        assert "not a readable GGUF file" in refusal(f"file://{tmp_path}/{name}.gguf")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_bigcode"}, "model_type 'gpt_bigcode' is not supported; use one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers 'many' is not supported"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 is not supported"),
        ({"head_dim": [8]}, "head_dim [8] is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small' is not supported"),
        ({"eos_token_id": [2, 160]}, "end token 160 is not among its 160 tokens"),
        ({"eos_token_id": -1}, "end token -1 is not among its 160 tokens"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4 KV heads"),
        ({"num_hidden_layers": 4}, "tensors are missing, first model.layers.3.input_layernorm"),
        ({"intermediate_size": 81}, "gate_proj.weight has shape [80, 48], its config means [81"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type 'yarn' is not supported",
        ),
    ],
)
def test_configs_that_the_decoder_cannot_serve(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    edit_config(folder, **changes)
    assert said in refusal(f"file://{folder}")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")],
)
def test_a_weight_that_is_no_number_is_refused_by_its_name(
    folder: Path, name: str, dtype: str, quantization: str
) -> None:
    for wrong in (torch.nan, -torch.inf):
        tensor = load_file(folder / "model.safetensors")[name]
        tensor.view(-1)[-1] = wrong
        edit_weights(folder, **{name: tensor})
        said = refusal(f"file://{folder}", dtype=dtype, quantization=quantization)
        assert said.startswith(f"model: {name} holds values that are not finite in torch.")
        assert said.endswith("; use a checkpoint that is not damaged")


def test_a_weight_beyond_what_its_dtype_holds_is_refused(folder: Path) -> None:
    edit_weights(folder, lm_head__weight=torch.full((160, 48), 3.4e38))
    load(f"file://{folder}")
    said = refusal(f"file://{folder}", dtype="bfloat16")
    assert "lm_head.weight holds values that are not finite in torch.bfloat16" in said


def test_broken_folders(folder: Path) -> None:
    url = f"file://{folder}"
    edit_weights(folder, lm_head__weight=None)
    assert "1 of 51 tensors are missing, first lm_head.weight" in refusal(url)
    (folder / "model.safetensors").write_bytes(b"torn")
    assert "not a readable safetensors file" in refusal(url)
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(url)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "shard named in the index is missing" in refusal(url)
    for text in ("{}", "[]", '{"weight_map": {"a": 1, "b": "c"}}', '{"weight_map": [1]}'):
        index.write_text(text)
        assert "not a readable shard index" in refusal(url)
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refusal(url)


def test_a_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "not a tokenizer that can be loaded" in refusal(f"file://{folder}")
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(f"file://{folder}")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_model_len": 513}, "max_model_len: 513 is beyond the model's 512 tokens; set it to"),
        (
            {"kv_cache_memory": 10_000},
            # 16 blocks of 16 tokens, 3 layers, K and V, 2 heads of 8, 4 bytes.
            f"one sequence of max_model_len 256 tokens; set it to at least {16 * 6144}, or lower",
        ),
        ({"kv_cache_memory": 2**60}, f"kv_cache_memory: {2**60} bytes and "),
        ({"dtype": "float16"}, "dtype: float16 is not supported on a CPU; set dtype to"),
    ],
)
def test_settings_that_do_not_fit(folder: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(f"file://{folder}", **fields)


def test_a_draft_of_all_layers_is_refused_before_weights_are_read(folder: Path) -> None:
    lines: list[str] = []
    config = WorkerConfig(
        worker_id="w",
        model=f"file://{folder}",
        dtype="float32",
        device="cpu",
        max_model_len=64,
        speculative_method="draft",
        draft_layers=3,
    )
    with pytest.raises(ModelError, match=r"^draft_layers: 3 layers .*; set it to at most 2$"):
        load_model(config, lines.append)
    assert lines == [f"opening file://{folder}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_and_absent(folder: Path) -> None:
    assert refusal(f"file://{folder}", device="cuda").startswith("device: no CUDA device")


@pytest.mark.parametrize(
    ("has_kernels", "multiplies_bfloat16", "dtype"),
    [
        (True, True, "bfloat16"),
        (True, False, "bfloat16"),
        (False, True, "bfloat16"),
        (False, False, "float32"),
    ],
)
def test_auto_is_bfloat16_where_that_is_the_faster_one(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    *,
    has_kernels: bool,
    multiplies_bfloat16: bool,
) -> None:
    if has_kernels and isinstance(find_kernels(), Unavailable):
        pytest.skip("NO CPU KERNELS TO TEST")
    if not has_kernels:
        monkeypatch.setattr(loader, "find_kernels", lambda: Unavailable("a test"))
    monkeypatch.setattr(loader, "computes_bfloat16", lambda _: multiplies_bfloat16)
    loaded = load(f"file://{folder}", dtype="auto")
    assert loaded.layout.dtype == dtype
