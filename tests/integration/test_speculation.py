"""Speculation on the real model, float32: the same tokens with and without, whatever is asked.

Chunks of several rows and single rows may differ in the last bits of their logits. An answer that
differs is accepted only if, at its first difference, the two tokens are as good as tied.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from helpers.models import load
from helpers.recorders import Recorder, RecordingListener
from kvasir.proto.sampling import SamplingParams
from kvasir.router.text.tokenizer import ModelTokenizer
from kvasir.worker.contracts import Load, Request, Sampled, Work
from kvasir.worker.engine import Engine
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.loader import LoadedModel
from kvasir.worker.scheduler import Scheduler
from kvasir.worker.speculation.config import Method, SpeculationConfig

MAX_TOKENS = 24
TIE = 1e-3

TEXTS = (
    "Stock:\n- 12 lamps\n- 40 nails\n- 7 ropes\n\nThe same stock, with a price:\n- 12 lamps",
    "one two three one two three one two three one two",
    "Minutes of the harbor council. " + "The crane was inspected and found in order. " * 4,
    "A ferryman once lost a map of the river, and",
)

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=11, top_p=0.9),
    "hot": SamplingParams(temperature=1.3, seed=3, top_k=50),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "bias": SamplingParams(temperature=0.5, seed=5, logit_bias={28: 2.0, 198: -100.0}),
    "min tokens": SamplingParams(
        temperature=0.0, ignore_eos=False, min_tokens=9, stop_token_ids=frozenset({28, 198, 30})
    ),
    "logprobs": SamplingParams(temperature=0.7, seed=2, logprobs=3),
}

NGRAM = SpeculationConfig(Method.NGRAM, 6, adaptive=False)
DRAFT = SpeculationConfig(Method.DRAFT, 3, adaptive=False)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("bundled://smollm2-135m-instruct", speculative_method="draft", draft_layers=27)


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Every prompt with every way of sampling."""
    return [
        Request(f"{name} {number}", prompt, replace(sampling, max_tokens=MAX_TOKENS))
        for name, sampling in SAMPLINGS.items()
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def plain(model: LoadedModel, requests: list[Request]) -> Recorder:
    """All answers without speculation."""
    sink, load = answers(model, requests, None)
    assert (load.drafts, load.draft_tokens, load.accepted_tokens) == (0, 0, 0)
    return sink


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[tuple[int, ...]]:
    tokenizer = ModelTokenizer.from_files(model.tokenizer_files)
    return [tuple(tokenizer.encode(text)) for text in TEXTS]


def start(model: LoadedModel, speculation: SpeculationConfig | None, num_blocks: int) -> Engine:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=256,
        max_batched_tokens=128,
        eos_token_ids=model.eos_token_ids,
        speculation=speculation,
    )
    fatal: list[BaseException] = []
    runner = _Smaller(model, num_blocks)
    engine = Engine(Scheduler(config), runner, RecordingListener(), on_fatal=fatal.append)
    engine.start()
    return engine


class _Smaller:
    """The model's runner, of whose cache only some blocks are used."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = model.runner.block_bytes
        self.execute = model.runner.execute
        self.read_blocks = model.runner.read_blocks
        self.write_blocks = model.runner.write_blocks


def answers(
    model: LoadedModel,
    requests: Sequence[Request],
    speculation: SpeculationConfig | None,
    num_blocks: int = 150,
) -> tuple[Recorder, Load]:
    """What each request gets, all at once, and the counters at the end."""
    engine, sink = start(model, speculation, num_blocks), Recorder()
    try:
        for request in requests:
            assert engine.submit(request, sink) is None
        for request in requests:
            wait(sink, request.request_id)
        return sink, engine.load()
    finally:
        engine.stop()


def wait(sink: Recorder, request_id: str) -> None:
    """Token by token: a busy machine is slow, but not stuck."""
    while sink.finish(request_id) is None:
        more = len(sink.batches) + 1
        sink.wait(partial(_has, sink, more))


def _has(sink: Recorder, batches: int) -> bool:
    return len(sink.batches) >= batches


def assert_same(
    model: LoadedModel, requests: Sequence[Request], plain: Recorder, drafted: Recorder
) -> None:
    for request in requests:
        ours, theirs = plain.tokens(request.request_id), drafted.tokens(request.request_id)
        if ours != theirs:
            assert_tie(model, request, ours, theirs)
        else:
            assert plain.finish(request.request_id) is drafted.finish(request.request_id)
            assert_logprobs(request, plain, drafted)


def assert_tie(
    model: LoadedModel, request: Request, ours: Sequence[int], theirs: Sequence[int]
) -> None:
    """Greedy answers only: sampled ones are drawn from logits moved by noise."""
    first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    params = replace(request.sampling, max_tokens=1, logprobs=20, min_tokens=0)
    prefix = replace(request, prompt_ids=(*request.prompt_ids, *ours[:first]), sampling=params)
    sink, _ = answers(model, [prefix], None)
    (logprobs,) = (one for output in sink.outputs(prefix.request_id) for one in output.logprobs)
    top = dict(logprobs.top)
    assert request.sampling.temperature == 0.0, f"token {first} of a sampled answer differs"
    assert abs(top[ours[first]] - top[theirs[first]]) < TIE


def assert_logprobs(request: Request, plain: Recorder, drafted: Recorder) -> None:
    told = [
        [one for output in sink.outputs(request.request_id) for one in output.logprobs]
        for sink in (plain, drafted)
    ]
    if request.sampling.logprobs is not None:
        assert len(told[0]) == len(plain.tokens(request.request_id))
    for ours, theirs in zip(*told, strict=True):
        assert ours.rank == theirs.rank
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def accepted_of(sink: Recorder, request: Request) -> int:
    """Tokens that came without a step of their own."""
    outputs = sink.outputs(request.request_id)
    return sum(max(len(output.token_ids) - 1, 0) for output in outputs)


@pytest.mark.parametrize("speculation", [NGRAM, DRAFT], ids=["ngram", "draft"])
def test_tokens_are_those_without_speculation(
    model: LoadedModel,
    requests: list[Request],
    plain: Recorder,
    speculation: SpeculationConfig,
) -> None:
    drafted, load = answers(model, requests, speculation)
    assert 0 < load.accepted_tokens <= load.draft_tokens
    assert 0 < load.drafts <= load.draft_tokens
    assert_same(model, requests, plain, drafted)
    for name in SAMPLINGS:
        kind = [request for request in requests if request.request_id.startswith(name)]
        assert sum(accepted_of(drafted, request) for request in kind) > 0, name


def test_repetition_takes_fewer_steps(model: LoadedModel, requests: list[Request]) -> None:
    (request,) = (request for request in requests if request.request_id == "greedy 1")
    drafted, load = answers(model, [request], NGRAM)
    assert len(drafted.tokens(request.request_id)) == MAX_TOKENS
    steps = len(drafted.outputs(request.request_id))
    assert steps < 0.75 * MAX_TOKENS
    assert load.accepted_tokens == accepted_of(drafted, request) == MAX_TOKENS - steps


@pytest.mark.parametrize("speculation", [NGRAM, DRAFT], ids=["ngram", "draft"])
def test_preemption_changes_nothing(
    model: LoadedModel,
    requests: list[Request],
    plain: Recorder,
    speculation: SpeculationConfig,
) -> None:
    few = requests[:8]
    drafted, load = answers(model, few, speculation, num_blocks=11)
    assert load.preemptions > 0
    assert load.accepted_tokens > 0
    assert_same(model, few, plain, drafted)


def test_a_prompt_computed_elsewhere_is_speculated_on(
    model: LoadedModel, requests: list[Request], plain: Recorder
) -> None:
    (request,) = (request for request in requests if request.request_id == "temperature 0")
    request_id = request.request_id

    holder, held = start(model, NGRAM, 30), Recorder()
    try:
        assert holder.submit(replace(request, work=Work.PREFILL), held) is None
        wait(held, request_id)
        count = -(-len(request.prompt_ids) // 16)
        payload = holder.read_blocks(request_id, 0, count).result(60)
        assert payload is not None
        kept = memoryview(bytes(payload))
        holder.release(request_id)
    finally:
        holder.stop()

    decoder, sink = start(model, NGRAM, 30), Recorder()
    try:
        assert decoder.submit(replace(request, work=Work.RECEIVE), sink) is None
        sink.wait(lambda: bool(sink.reservations))
        assert decoder.commit_blocks(request_id, 0, kept).result(60)
        decoder.finish_receive(request_id, Sampled(held.tokens(request_id)[0]), 0)
        wait(sink, request_id)
        assert decoder.load().draft_tokens > 0
    finally:
        decoder.stop()
    assert_same(model, [request], plain, sink)
