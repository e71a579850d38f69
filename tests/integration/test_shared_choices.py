"""Choices that share their prompt's blocks, on the bundled model in float32."""

import pytest
from tokenizers import Tokenizer

from helpers.models import load
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Request
from kvasir.worker.loader import LoadedModel
from kvasir.worker.scheduler import Scheduler, SchedulerConfig

PROMPT = "Write one sentence about a lighthouse keeper who finds a bottle on the shore."
BLOCK_SIZE = 16
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("bundled://smollm2-135m-instruct", max_model_len=1024)


def answers(loaded: LoadedModel, requests: list[Request]) -> tuple[dict[str, list[int]], int, int]:
    """Output of each request, the most blocks in use in a step, and the prompts' tokens."""
    config = SchedulerConfig(
        loaded.runner.num_blocks, BLOCK_SIZE, loaded.max_model_len, prefix_caching=False
    )
    scheduler = Scheduler(config)
    for request in requests:
        scheduler.add(request)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    most_blocks = computed = 0
    while (plan := scheduler.plan(0.0)).chunks:
        computed += sum(len(c.token_ids) for c in plan.chunks if len(c.token_ids) > 1)
        scheduler.update(plan, loaded.runner.execute(plan))
        most_blocks = max(most_blocks, len({b for c in plan.chunks for b in c.block_table}))
        for output in scheduler.take_outputs():
            outputs[output.request_id] += output.token_ids
    scheduler.check()
    assert scheduler.load().kv_blocks_used == 0
    return outputs, most_blocks, computed


@pytest.mark.parametrize("surplus", [0, 9])
def test_choices_equal_those_drawn_alone_and_share_blocks(
    loaded: LoadedModel, surplus: int
) -> None:
    tokenizer = Tokenizer.from_buffer(loaded.tokenizer_files["tokenizer.json"])
    prompt = tuple((tokenizer.encode(PROMPT).ids * 5)[: 3 * BLOCK_SIZE + surplus])

    def choices(group: str) -> list[Request]:
        return [
            Request(
                f"c{i}",
                prompt,
                SamplingParams(
                    temperature=1.0, seed=40 + i, max_tokens=MAX_TOKENS, ignore_eos=True
                ),
                group=group,
            )
            for i in range(3)
        ]

    shared, most_blocks, computed = answers(loaded, choices("g"))
    alone = {name: tokens for r in choices("") for name, tokens in answers(loaded, [r])[0].items()}
    assert shared == alone
    assert len(set(map(tuple, shared.values()))) > 1, "the choices differ"
    assert computed == len(prompt), "the prompt is computed once"
    # A prompt of whole blocks: the copies of its last one stay, because no cache unites them.
    full = (len(prompt) - 1) // BLOCK_SIZE
    whole = -(-(len(prompt) + MAX_TOKENS - 1) // BLOCK_SIZE)
    assert most_blocks == full + 3 * (whole - full)
