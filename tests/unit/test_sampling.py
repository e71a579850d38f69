"""The batched sampler against a plain one, and what it promises about batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plain_sampler import adjusted_row, allowed_tokens, distribution, scores
from kvasir.proto.errors import Refusal
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import SampleSpec
from kvasir.worker.sampling import sampler
from kvasir.worker.sampling.adjust import adjust
from kvasir.worker.sampling.sampler import sample
from kvasir.worker.sampling.truncate import truncate
from kvasir.worker.service.requests import Limits, read_submit

VOCAB = 40
EOS = frozenset({3})
TOKENS = st.integers(0, VOCAB - 1)


def make_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)
    )


def spec(index: int = 0, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), index, (), ())


def tokens(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int | None]:
    return [entry.token_id for entry in sample(logits, specs, EOS)]


def assert_drawn(logits: torch.Tensor, batch: list[SampleSpec]) -> None:
    """Each token has the greatest score of the plain sampler, up to a proven tie."""
    for row, one, token in zip(logits.numpy(), batch, tokens(logits, batch), strict=True):
        expected = scores(distribution(row, one, EOS), one)
        assert token is not None
        assert expected[token] >= expected.max() - 1e-4


@st.composite
def specs(draw_: st.DrawFn) -> SampleSpec:
    params = SamplingParams(
        temperature=draw_(st.sampled_from([0.0, 1e-4, 0.3, 1.0, 1.7])),
        top_p=draw_(st.sampled_from([1.0, 1e-6, 0.1, 0.55, 0.93])),
        top_k=draw_(st.sampled_from([0, 1, 2, 7, VOCAB, 1000])),
        min_p=draw_(st.sampled_from([0.0, 0.02, 0.3])),
        presence_penalty=draw_(st.sampled_from([0.0, -1.5, 2.0])),
        frequency_penalty=draw_(st.sampled_from([0.0, -0.7, 1.1])),
        repetition_penalty=draw_(st.sampled_from([1.0, 0.6, 1.9])),
        logit_bias=draw_(st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.0, 5.0]), max_size=3)),
        seed=draw_(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw_(st.frozensets(TOKENS, max_size=2)),
    )
    return SampleSpec(
        params,
        index=draw_(st.integers(0, 5000)),
        prompt_ids=draw_(st.lists(TOKENS, max_size=6)),
        output_ids=draw_(st.lists(TOKENS, max_size=8)),
        forbid_stop=draw_(st.booleans()),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_every_adjusted_logit_equals_the_plain_one(batch: list[SampleSpec], seed: int) -> None:
    logits = make_logits(len(batch), seed)
    found = adjust(logits, batch, EOS)
    rows = zip(logits.numpy(), batch, strict=True)
    expected = torch.from_numpy(np.stack([adjusted_row(row, one, EOS) for row, one in rows]))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_exactly_the_plain_tokens_are_left(batch: list[SampleSpec], seed: int) -> None:
    logits = make_logits(len(batch), seed)
    found = truncate(logits, [one.params for one in batch])
    for before, after, one in zip(logits.numpy(), found.numpy(), batch, strict=True):
        allowed = allowed_tokens(before, one)
        assert (np.isfinite(after) == allowed).all()
        assert (after[allowed] == before[allowed]).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_batch_equals_the_plain_sampler(batch: list[SampleSpec], seed: int) -> None:
    logits = make_logits(len(batch), seed)
    assert_drawn(logits, batch)


@settings(max_examples=50, deadline=None)
@given(st.lists(specs(), min_size=2, max_size=6), st.integers(0, 2**32))
def test_a_row_draws_the_same_alone(batch: list[SampleSpec], seed: int) -> None:
    logits = make_logits(len(batch), seed)
    alone = [tokens(logits[i : i + 1], [one])[0] for i, one in enumerate(batch)]
    assert tokens(logits, batch) == alone


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
)
def test_seeds_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square over the tokens, at 99.99 % for at most 39 degrees of freedom: under 80."""
    count = 20_000
    row = make_logits(1, seed=5) / 2
    batch = [spec(seed=seed, **params) for seed in range(count)]
    drawn = tokens(row.expand(count, -1), batch)
    expected = distribution(row[0].numpy(), batch[0], EOS) * count
    found = np.bincount(np.array(drawn), minlength=VOCAB)
    assert not found[expected == 0].any()
    likely = expected >= 5
    statistic = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < 80
    assert likely.sum() > 5


def test_output_index_alone_moves_the_random_number() -> None:
    flat = torch.zeros(1, VOCAB)
    drawn = [tokens(flat, [spec(index=index, seed=9)])[0] for index in range(50)]
    assert drawn == tokens(flat.expand(50, -1), [spec(index=i, seed=9) for i in range(50)])
    assert len(set(drawn)) > 15


def test_wide_top_p_falls_back_to_the_whole_vocabulary() -> None:
    """Flat logits: far more tokens than the usual sort are needed to reach 0.9."""
    vocab = 5000
    logits = make_logits(3, seed=1, vocab=vocab) / 30
    batch = [spec(seed=seed, top_p=0.9) for seed in range(3)]
    allowed = [np.count_nonzero(distribution(row, batch[0], EOS)) for row in logits.numpy()]
    assert min(allowed) > 1024
    assert_drawn(logits, batch)


def test_tied_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).expand(400, -1)
    drawn = tokens(logits, [spec(seed=seed, top_k=2) for seed in range(400)])
    assert set(drawn) == {1, 2, 3}


@pytest.mark.parametrize("noise", [2.0**-54, 2.0**-24, 1.0, 17.0])
def test_no_noise_draws_a_token_that_may_not_be_drawn(
    monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    """The first and the last tokens have no probability; the others share the noise."""
    monkeypatch.setattr(
        sampler, "exponentials", lambda keys, vocab: torch.full((len(keys), vocab), noise)
    )
    logits = torch.tensor([[-9.0, -9.0, 2.0, 1.0, 1.5, 2.5, -9.0]])
    assert tokens(logits, [spec(top_k=4)]) == [5]


def test_noise_in_the_last_bits_of_logits_changes_no_token() -> None:
    """Another batch shape changes logits by some 1e-6: no reason to draw another token."""
    rows = 2000
    logits = make_logits(rows, seed=8, vocab=2000)
    noise = torch.from_numpy(np.random.default_rng(9).normal(0, 1e-6, logits.shape)).float()
    batch = [spec(seed=seed) for seed in range(rows)]
    drawn, again = tokens(logits, batch), tokens(logits + noise, batch)
    assert sum(a != b for a, b in zip(drawn, again, strict=True)) <= 1


def test_forbidden_stops_are_never_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 5], logits[0, 8] = 50.0, 40.0, 30.0
    one = spec(temperature=0.0, stop_token_ids=frozenset({5}))
    assert tokens(logits, [one]) == [3]
    assert tokens(logits, [replace(one, forbid_stop=True)]) == [8]


def test_presence_and_frequency_count_output_only() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6] = 2.0, 1.0
    params = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)
    assert tokens(logits, [SampleSpec(params, 0, (4, 4, 4), ())]) == [4]
    assert tokens(logits, [SampleSpec(params, 1, (), (4,))]) == [6]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = make_logits(3, seed=2)
    batch = [
        spec(temperature=0.0, logprobs=2, logit_bias={7: 100.0}),
        spec(temperature=1.0, seed=4, logprobs=0),
        spec(temperature=1.0, seed=4),
    ]
    results = sample(logits, batch, EOS)
    raw = logits.numpy().astype(np.float64)
    exact = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    first, second = results[0].logprobs, results[1].logprobs
    assert first is not None
    assert second is not None
    assert results[2].logprobs is None
    assert results[0].token_id == 7
    order = np.argsort(-exact[0])
    assert first.logprob == pytest.approx(exact[0, 7], abs=1e-5)
    assert first.rank == list(order).index(7) + 1
    assert [token for token, _ in first.top] == order[:2].tolist()
    assert [value for _, value in first.top] == pytest.approx(exact[0, order[:2]], abs=1e-5)
    assert second.logprob == pytest.approx(exact[1, results[1].token_id], abs=1e-5)
    assert second.top == ()


def test_logits_that_are_not_numbers_are_an_error() -> None:
    logits = make_logits(2, seed=0)
    logits[1, 5] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, [spec(temperature=0.0), spec(temperature=0.0)], EOS)


def test_infinite_logits_are_an_error_although_a_request_bans_them() -> None:
    logits = make_logits(1, seed=0)
    logits[0, 3] = float("-inf")
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, [replace(spec(), forbid_stop=True)], EOS)


def extreme(low: float, high: float) -> st.SearchStrategy[float]:
    """Single precision, as on the wire, with the bounds and the tiniest steps from them."""
    bounds = [np.float32(low), np.float32(high)]
    near = [np.nextafter(bounds[0], bounds[1]), np.nextafter(bounds[1], bounds[0])]
    within = st.floats(float(bounds[0]), float(bounds[1]), width=32)
    return st.sampled_from([float(value) for value in (*bounds, *near)]) | within


LARGEST = float(np.finfo(np.float32).max)
LIMITS = Limits(vocab_size=VOCAB, max_model_len=10_000, block_size=16, eos_token_ids=EOS)


@st.composite
def messages(draw_: st.DrawFn) -> pb.Submit:
    """Of all that the wire can carry, what may well be accepted."""
    return pb.Submit(
        request_id="r",
        prompt_token_ids=draw_(st.lists(TOKENS, min_size=1, max_size=6)),
        output_token_ids=draw_(st.lists(TOKENS, max_size=60)),
        sampling=pb.SamplingParams(
            temperature=draw_(extreme(0, LARGEST)),
            top_p=draw_(extreme(0, 1)),
            top_k=draw_(st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB, 2**32 - 1])),
            min_p=draw_(extreme(0, 1)),
            presence_penalty=draw_(extreme(-2, 2)),
            frequency_penalty=draw_(extreme(-2, 2)),
            repetition_penalty=draw_(extreme(0, LARGEST) | extreme(0.01, 10)),
            logit_bias=draw_(st.dictionaries(TOKENS, extreme(-100, 100), max_size=VOCAB)),
            seed=draw_(st.sampled_from([0, 1, 2**63, 2**64 - 1])),
            max_tokens=9000,
            min_tokens=draw_(st.sampled_from([0, 9000])),
            stop_token_ids=draw_(st.frozensets(TOKENS, max_size=3) | st.just(range(VOCAB))),
            logprobs=draw_(st.sampled_from([-1, 0, 20])),
            prompt_logprobs=-1,
        ),
    )


@settings(max_examples=400, deadline=None)
@given(
    st.lists(messages(), min_size=1, max_size=4),
    st.sampled_from([1e-30, 1.0, 30.0, 1e30, LARGEST / 8]),
    st.integers(0, 2**32),
)
def test_nothing_that_is_accepted_breaks_the_sampler(
    batch: list[pb.Submit], scale: float, seed: int
) -> None:
    """Whatever a request asks, each row gets a token, and none that may not be drawn."""
    specs = []
    for message in batch:
        request = read_submit(message, LIMITS)
        if isinstance(request, Refusal):
            continue
        params, index = request.sampling, len(request.output_ids)
        forbid = index < params.min_tokens
        specs.append(SampleSpec(params, index, request.prompt_ids, request.output_ids, forbid))
    if not specs:
        return
    logits = make_logits(len(specs), seed).clamp(-7, 7) * scale
    logits[0, :5] = scale  # ties
    for one, sampled in zip(specs, sample(logits, specs, EOS), strict=True):
        assert 0 <= sampled.token_id < VOCAB
        if one.forbid_stop:
            assert sampled.token_id not in EOS | one.params.stop_token_ids


@pytest.mark.parametrize("penalty", [0.01, 10.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_a_logit_leaves_it_finite(
    penalty: float, temperature: float
) -> None:
    logits = make_logits(1, seed=0)
    logits[0, 4], logits[0, 6] = LARGEST, -LARGEST
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
    one = SampleSpec(params, 0, (4, 6), ())
    assert adjust(logits, [one], EOS).isfinite().all()
    assert tokens(logits, [one]) == [4]
