"""The bundled model against transformers reading the same file, in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from helpers.models import load, reference_bundled, reference_greedy
from helpers.tiny_scheduler import TinyScheduler
from kvasir.worker.contracts import Chunk, StepPlan
from kvasir.worker.loader import LoadedModel

BUNDLED = "bundled://smollm2-135m-instruct"
PROMPTS = (
    "The three primary colors are",
    "<|im_start|>user\nName two rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1998, 47 sailors crossed the bay; 12 of them " * 6,
    "Once upon a time a lighthouse keeper found a bottle on the shore.",
)


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_bundled()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(BUNDLED, max_model_len=1024)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    tokenizer = Tokenizer.from_buffer(loaded.tokenizer_files["tokenizer.json"])
    return [tokenizer.encode(text).ids for text in PROMPTS]


def all_logprobs(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Logprobs of the whole vocabulary after every token of a prompt but the last."""
    table = tuple(range(-(-len(prompt) // 16)))
    chunk = Chunk("a", tuple(prompt), 0, table, prompt_logprobs=loaded.vocab_size)
    entries = loaded.runner.execute(StepPlan((chunk,)))["a"].prompt_logprobs
    result = torch.empty(len(entries), loaded.vocab_size)
    for row, entry in zip(result, entries, strict=True):
        ids, values = zip(*entry.top, strict=True)
        row[torch.tensor(ids)] = torch.tensor(values)
    return result


@torch.inference_mode()
def test_logprobs_of_the_whole_vocabulary_match(
    loaded: LoadedModel, prompts: list[list[int]], reference: Any
) -> None:
    for prompt in prompts[:3]:
        expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(all_logprobs(loaded, prompt), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [7, 512])
def test_greedy_tokens_match_in_a_mixed_batch(
    loaded: LoadedModel, prompts: list[list[int]], reference: Any, chunk_tokens: int
) -> None:
    """Sequences of different lengths in one batch, so prefill chunks and decode mix."""
    scheduler = TinyScheduler(loaded.runner, block_size=16, seed=chunk_tokens)
    for prompt in prompts:
        scheduler.add(prompt, room=16)
    scheduler.run(chunk_tokens, max_output=16)
    for sequence, prompt in zip(scheduler.sequences, prompts, strict=True):
        assert sequence.output == reference_greedy(reference, prompt, 16)


def test_cached_prefix_gives_the_same_tokens(
    loaded: LoadedModel, prompts: list[list[int]], reference: Any
) -> None:
    scheduler = TinyScheduler(loaded.runner, block_size=16, seed=3)
    first = scheduler.add(prompts[3], room=8)
    scheduler.run(64, max_output=8)
    second = scheduler.add([*prompts[3], *prompts[0]], room=8, share=first)
    assert second.computed >= 64
    scheduler.run(64, max_output=8)
    assert second.output == reference_greedy(reference, list(second.prompt), 8)


def test_blocks_moved_to_another_place_give_the_same_tokens(
    loaded: LoadedModel, prompts: list[list[int]], reference: Any
) -> None:
    prompt = prompts[3]
    blocks = -(-len(prompt) // 16)
    source, target = tuple(range(blocks)), tuple(range(40 + blocks, 40, -1))
    runner = loaded.runner
    runner.execute(StepPlan((Chunk("a", tuple(prompt[:-1]), 0, source),)))
    runner.write_blocks(target, runner.read_blocks(source, len(prompt) - 1))
    scheduler = TinyScheduler(runner, block_size=16)
    sequence = scheduler.add(prompt, room=0)
    sequence.block_table, sequence.computed = target, len(prompt) - 1
    scheduler.run(1, max_output=1)
    assert sequence.output == reference_greedy(reference, prompt, 1)


def test_hugging_face_folder_gives_the_same_result(
    loaded: LoadedModel, prompts: list[list[int]], reference: Any, tmp_path: Path
) -> None:
    """transformers wrote this folder, so it proves the order of Q and K rows as well."""
    reference.save_pretrained(tmp_path, max_shard_size="200MB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    for name, data in loaded.tokenizer_files.items():
        (tmp_path / name).write_bytes(data)
    folder = load(f"file://{tmp_path}", max_model_len=1024)
    torch.testing.assert_close(
        all_logprobs(folder, prompts[1]), all_logprobs(loaded, prompts[1]), atol=1e-5, rtol=0
    )
    assert folder.eos_token_ids == loaded.eos_token_ids
    assert folder.layout.model_fingerprint != loaded.layout.model_fingerprint
    theirs, ours = folder.tokenizer_files, loaded.tokenizer_files
    assert theirs["tokenizer.json"] == ours["tokenizer.json"]
    assert theirs["chat_template.jinja"] == ours["chat_template.jinja"]
    assert json.loads(theirs["tokenizer_config.json"]) == json.loads(ours["tokenizer_config.json"])


def test_bfloat16_is_close_to_float32(loaded: LoadedModel, prompts: list[list[int]]) -> None:
    """Mean KL divergence over the positions of a text; what bfloat16 costs in quality."""
    half = load(BUNDLED, dtype="bfloat16", max_model_len=1024)
    exact = all_logprobs(loaded, prompts[4]).double()
    rounded = all_logprobs(half, prompts[4]).double()
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean().item()
    assert 0 < divergence < 2e-3
