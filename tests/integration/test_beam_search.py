"""Beam search against transformers' own, on the bundled model and on a tiny one, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from helpers.models import load, reference_bundled, save_tiny
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.beam_search import num_candidates
from kvasir.worker.contracts import BeamParams, Finish, Hypothesis, Request
from kvasir.worker.loader import LoadedModel
from kvasir.worker.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16


def search(
    loaded: LoadedModel,
    prompt: list[int],
    params: BeamParams,
    max_tokens: int,
    stop_ids: frozenset[int],
) -> tuple[Hypothesis, ...]:
    config = SchedulerConfig(
        loaded.runner.num_blocks, BLOCK_SIZE, loaded.max_model_len, eos_token_ids=stop_ids
    )
    scheduler = Scheduler(config)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=num_candidates(params, len(stop_ids))
    )
    scheduler.add(Request("r", tuple(prompt), sampling, beam=params))
    while (plan := scheduler.plan(0.0)).chunks:
        scheduler.update(plan, loaded.runner.execute(plan))
        scheduler.check()
    (output,) = scheduler.take_outputs()
    assert output.finish is not None
    assert scheduler.load().kv_blocks_used == 0
    return output.hypotheses


def reference_search(
    model: Any, prompt: list[int], params: BeamParams, max_tokens: int, stop_id: int | None
) -> list[tuple[list[int], float]]:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        num_beams=params.width,
        num_return_sequences=params.width,
        length_penalty=params.length_penalty,
        early_stopping=False,
        eos_token_id=stop_id,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    results = []
    rows = zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True)
    for sequence, score in rows:
        tokens = sequence[len(prompt) :]
        if stop_id in tokens:  # what follows is padding
            tokens = tokens[: tokens.index(stop_id) + 1]
        results.append((tokens, score))
    return results


def assert_same(ours: tuple[Hypothesis, ...], theirs: list[tuple[list[int], float]]) -> None:
    assert [list(one.token_ids) for one in ours] == [tokens for tokens, _ in theirs]
    for one, (_, score) in zip(ours, theirs, strict=True):
        assert one.score == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (4, 0.0), (5, -1.0)])
def test_sequences_and_scores_are_those_of_transformers(
    tmp_path: Path, width: int, penalty: float
) -> None:
    """A tiny model of random weights, which ends early more often than a trained one."""
    reference = save_tiny("llama", tmp_path)
    loaded = load(f"file://{tmp_path}")
    generator = torch.Generator().manual_seed(width)
    for stop_id in (2, 140):
        prompt = torch.randint(3, 160, (19,), generator=generator).tolist()
        params = BeamParams(width, penalty)
        ours = search(loaded, prompt, params, 20, frozenset({stop_id}))
        assert_same(ours, reference_search(reference, prompt, params, 20, stop_id))


def test_the_bundled_model_finds_what_transformers_finds() -> None:
    loaded = load("bundled://smollm2-135m-instruct", max_model_len=1024)
    tokenizer = Tokenizer.from_buffer(loaded.tokenizer_files["tokenizer.json"])
    prompt = tokenizer.encode("The capital of France is Paris. The capital of Italy is").ids
    params = BeamParams(3)
    (stop_id,) = loaded.eos_token_ids
    ours = search(loaded, prompt, params, 12, loaded.eos_token_ids)
    assert_same(ours, reference_search(reference_bundled(), prompt, params, 12, stop_id))
    assert len(ours) == 3
    assert all(one.finish in (Finish.STOP, Finish.LENGTH) for one in ours)
