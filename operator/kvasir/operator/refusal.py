"""Why a process refused its configuration, in the words of the ModelService it comes from.

A component names the fields of its own configuration, which plan.py fills. Pure. Only names
that are known are rewritten; any other text passes unchanged.
"""

import re

from kvasir.operator.quantity import format_bytes

WORKER_FIELDS = {
    "model": "spec.model.source",
    "served_name": "spec.model.servedName",
    "max_model_len": "spec.model.maxModelLen",
    "dtype": "spec.model.dtype",
    "quantization": "spec.model.quantization",
    "activation_quantization": "spec.model.activationQuantization",
    "block_size": "spec.engine.blockSize",
    "kv_cache_memory": "spec.engine.kvCacheMemory",
    "max_batched_tokens": "spec.engine.maxBatchedTokens",
    "max_running_requests": "spec.engine.maxRunningRequests",
    "prefix_caching": "spec.engine.prefixCaching",
    "speculative_method": "spec.engine.speculative.method",
    "num_speculative_tokens": "spec.engine.speculative.numSpeculativeTokens",
    "drain_deadline": "spec.rollout.drainDeadline",
}
"""Field of a worker's configuration to path in the ModelService."""

_COMPONENT = re.compile(r"kvasir-(?:worker|router): ")
_FIELD_AT_FAULT = re.compile(rf"({'|'.join(WORKER_FIELDS)})(?=: )")
# `model`, `dtype` and `quantization` are also words; a name in a path is part of the path.
_FIELD = re.compile(rf"(?<![\w./-])({'|'.join(n for n in WORKER_FIELDS if '_' in n)})(?![\w/-])")
_SIZE = re.compile(r"(\d+) bytes")
_LEAST_SIZE = re.compile(r"(?<=at least )(\d+)")
_MIB = 1024**2


def in_terms_of_the_spec(message: str) -> str:
    """One line ``kvasir-worker: field: problem; fix`` as ``spec.path: problem; fix``.

    Sizes of the KV cache, which are bytes to a worker, become what a user writes.
    """
    component = _COMPONENT.match(message)
    text = message[component.end() :] if component else message
    if text.startswith("kv_cache_memory: "):
        text = _LEAST_SIZE.sub(_rounded_up, _SIZE.sub(_size, text))
    if at_fault := _FIELD_AT_FAULT.match(text):
        name = at_fault.group()
        return WORKER_FIELDS[name] + _FIELD.sub(_path, text.removeprefix(name))
    return text


def _path(match: re.Match[str]) -> str:
    return WORKER_FIELDS[match[1]]


def _size(match: re.Match[str]) -> str:
    return format_bytes(int(match[1]))


def _rounded_up(match: re.Match[str]) -> str:
    return f"{-(-int(match[1]) // _MIB)}Mi"
