"""The sampler's meaning in plain numpy, one row at a time: an independent reference."""

import numpy as np

from kvasir.worker.contracts import SampleSpec
from kvasir.worker.sampling.rng import uniforms


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


def draw(probabilities: np.ndarray, spec: SampleSpec) -> int:
    """Walk the tokens in id order until the random number is passed."""
    number = uniforms([spec.params.seed], [spec.index])[0]
    running = 0.0
    for token, probability in enumerate(probabilities):
        running += probability
        if probability > 0 and running > number:
            return token
    return int(np.nonzero(probabilities)[0][-1])
