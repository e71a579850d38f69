"""The sampler's meaning in plain numpy, one row at a time: an independent reference."""

import numpy as np

from kvasir.worker.contracts import SampleSpec
from kvasir.worker.sampling.rng import stream_keys


def adjusted_row(logits: np.ndarray, spec: SampleSpec, eos_ids: frozenset[int]) -> np.ndarray:
    params = spec.params
    row = logits.astype(np.float32).copy()
    for token in set(spec.prompt_ids) | set(spec.output_ids):
        penalty = np.float32(params.repetition_penalty)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(spec.output_ids):
        count = list(spec.output_ids).count(token)
        row[token] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
    for token, bias in params.logit_bias.items():
        row[token] += np.float32(bias)
    if spec.forbid_stop:
        for token in eos_ids | params.stop_token_ids:
            row[token] = -np.inf
    return row


def allowed_tokens(scaled: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """Which tokens top-k, top-p and min-p leave, by definition rather than by threshold."""
    params = spec.params
    descending = np.sort(scaled)[::-1].astype(np.float64)
    if params.top_k:
        descending = descending[: params.top_k]
    weights = np.exp(descending - descending[0])
    keep = len(descending)
    if params.top_p < 1.0:
        total, running = weights.sum(), 0.0
        for index, weight in enumerate(weights):
            running += weight
            if running >= params.top_p * total:
                keep = index + 1
                break
    allowed = scaled >= descending[keep - 1]
    probabilities = np.exp(scaled.astype(np.float64) - scaled.max())
    return np.asarray(allowed & (probabilities >= params.min_p * probabilities.max()))


def distribution(logits: np.ndarray, spec: SampleSpec, eos_ids: frozenset[int]) -> np.ndarray:
    """Probability of every token, float64 [vocab]."""
    row = adjusted_row(logits, spec, eos_ids)
    if spec.params.temperature == 0.0:
        return np.asarray(np.eye(len(row))[int(row.argmax())])
    scaled = (row - row.max()) / np.float32(spec.params.temperature)
    weights = np.where(allowed_tokens(scaled, spec), np.exp(scaled.astype(np.float64)), 0.0)
    return np.asarray(weights / weights.sum())


def scores(probabilities: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """Log probability plus Gumbel noise, float64 [vocab]; the token of the greatest is drawn."""
    key = int(stream_keys([spec.params.seed], [spec.index])[0])
    uniform = np.array([(bits >> 11) + 0.5 for bits in splitmix64(key, len(probabilities))]) / 2**53
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(probabilities) - np.log(-np.log1p(-uniform)))


def splitmix64(state: int, count: int) -> list[int]:
    """The first outputs of SplitMix64, as its authors write it, in whole numbers."""
    mask = 2**64 - 1
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(bits ^ (bits >> 31))
    return outputs
