"""Tiny random models of every supported architecture, against transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.models import TINY, TINY_VOCAB, load, reference_greedy, save_tiny
from helpers.tiny_scheduler import TinyScheduler
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Chunk, SampleSpec, StepPlan
from kvasir.worker.loader import LoadedModel
from kvasir.worker.model.config import from_hf
from kvasir.worker.model.rope import frequencies

PROMPTS = (list(range(5, 90)), [9, 8, 7], [3], list(range(150, 50, -1)))


@pytest.fixture(scope="module", params=list(TINY))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return_value = save_tiny(request.param, folder, shard="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return load(f"file://{folder}", block_size=8), return_value


def test_every_logprob_matches(pair: tuple[LoadedModel, Any]) -> None:
    loaded, reference = pair
    prompt = PROMPTS[0]
    chunk = Chunk("a", tuple(prompt), 0, tuple(range(11)), prompt_logprobs=TINY_VOCAB)
    entries = loaded.runner.execute(StepPlan((chunk,)))["a"].prompt_logprobs
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries):
        row = expected[position]
        assert entry.logprob == pytest.approx(row[prompt[position + 1]].item(), abs=1e-4)
        assert entry.rank == int((row > row[prompt[position + 1]]).sum()) + 1
        found = torch.tensor([value for _, value in sorted(entry.top)])
        torch.testing.assert_close(found, row, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 64])
def test_greedy_tokens_match(pair: tuple[LoadedModel, Any], chunk_tokens: int) -> None:
    loaded, reference = pair
    scheduler = TinyScheduler(loaded.runner, block_size=8, seed=chunk_tokens)
    for prompt in PROMPTS:
        scheduler.add(prompt, room=12)
    scheduler.run(chunk_tokens, max_output=12)
    for sequence in scheduler.sequences:
        assert sequence.output == reference_greedy(reference, list(sequence.prompt), 12)


def test_prompt_logprobs_in_chunks_equal_those_in_one(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    runner = load(f"file://{tmp_path}").runner
    prompt, table = tuple(range(40)), (3, 1, 2)
    whole = Chunk("a", prompt, 0, table, prompt_logprobs=1)
    expected = runner.execute(StepPlan((whole,)))["a"].prompt_logprobs
    parts = [
        Chunk("a", prompt[:25], 0, table, prompt_logprobs=1, next_token_id=prompt[25]),
        Chunk("a", prompt[25:], 25, table, prompt_logprobs=1),
    ]
    found = [entry for part in parts for entry in _only(runner.execute(StepPlan((part,))))]
    assert [entry.rank for entry in found] == [entry.rank for entry in expected]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected], abs=1e-5)


def _only(result: Any) -> Any:
    return result["a"].prompt_logprobs


def test_every_chunk_has_a_result_and_a_request_may_not_come_twice(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    runner = load(f"file://{tmp_path}").runner
    spec = SampleSpec(SamplingParams(temperature=0.0), 0, (), ())
    chunks = (
        Chunk("prefill", (1, 2, 3), 0, (0,)),
        Chunk("decode", (4,), 0, (1,), samples=(spec,)),
    )
    result = runner.execute(StepPlan(chunks))
    assert result["prefill"].sampled == ()
    assert len(result["decode"].sampled) == 1
    assert runner.execute(StepPlan(())) == {}
    with pytest.raises(ValueError, match="twice"):
        runner.execute(StepPlan((chunks[0], chunks[0])))


def test_llama3_frequencies_equal_those_of_transformers() -> None:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    found = frequencies(from_hf(config.to_dict()))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_older_configs_keep_rope_at_the_top_level() -> None:
    raw = {
        "model_type": "mistral",
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_scaling": None,
    }
    config = from_hf(raw)
    assert config.rope_theta == 1e6
    assert config.context == 4096
    assert config.num_kv_heads == 4
