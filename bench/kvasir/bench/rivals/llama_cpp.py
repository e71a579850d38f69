"""llama.cpp, for run.py, through llama-cpp-python's low-level API.

Run by the Python of llama-cpp's own environment, never by Kvasir's: it imports llama_cpp, numpy
(which comes with it) and the standard library only. Requests run together as llama.cpp's own
server runs them: in each step one token of everyone who has begun, then prompts up to
``max_batched_tokens``. A sequence's KV stays when its request ends, and a later request that
begins alike takes it over.
"""

import hashlib
import importlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

lib: Any = importlib.import_module("llama_cpp")
"""Untyped, and not installed where this file is checked."""

_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
"""llama_ftype in llama.h."""


def _converted(path: Path, dtype: str, threads: int) -> Path:
    """The same weights in ``dtype``, written once, beside this environment."""
    folder = Path(sys.prefix).parent / "models"
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    target = folder / f"{path.stem}-{digest}-{dtype}.gguf"
    if target.exists():
        return target
    params = lib.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = _FILE_TYPES[dtype]
    params.allow_requantize = True
    params.pure = True  # every matrix, the embedding among them
    partial = target.with_suffix(".partial")
    if lib.llama_model_quantize(os.fsencode(path), os.fsencode(partial), params) != 0:
        sys.exit(f"llama.cpp cannot convert {path} to {dtype}")
    partial.rename(target)
    return target


@dataclass(slots=True)
class Sequence:
    """A place in the KV cache. ``tokens`` are those whose KV it holds."""

    number: int
    tokens: list[int] = field(default_factory=list)

    def shares(self, prompt: list[int]) -> int:
        """Leading tokens of ``prompt`` whose KV is here already."""
        pairs = enumerate(zip(self.tokens, prompt, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.tokens), len(prompt)))


@dataclass(slots=True)
class Request:
    """One prompt under way. ``known``: prompt and output, of which ``sequence`` holds a part."""

    sequence: Sequence
    known: list[int]
    times: list[float] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        return self.known[len(self.sequence.tokens) :]


class Rival:
    """A model and a context of llama.cpp, ready."""

    def __init__(self, settings: dict[str, Any]) -> None:
        lib.llama_backend_init()
        self.version: str = lib.__version__
        path = Path(settings["model"])
        if settings["dtype"] != "stored":
            path = _converted(path, settings["dtype"], settings["threads"])
        self._model = lib.llama_model_load_from_file(
            os.fsencode(path), lib.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._budget = settings["max_batched_tokens"]
        params = lib.llama_context_default_params()
        params.n_ctx = settings["max_model_len"] * settings["max_requests"]
        params.n_batch = self._budget
        params.n_seq_max = settings["max_requests"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        # A stream of KV for each sequence: in one for all, attention reads everyone's, which takes
        # more than three times as long at 64 sequences.
        params.kv_unified = False
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            sys.exit("llama.cpp cannot make a context")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(self._budget, 0, 1)
        self._sequences = [Sequence(i) for i in range(settings["max_requests"])]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Seconds from now to each greedy token, for each prompt."""
        start = time.perf_counter()
        free = list(self._sequences)
        requests = [self._begin(prompt, free) for prompt in prompts]
        while running := [r for r in requests if len(r.times) < max_tokens]:
            ready = self._fill(running)
            tokens = self._compute(len(ready))
            now = time.perf_counter() - start
            for request, token in zip(ready, tokens, strict=True):
                request.known.append(token)
                request.times.append(now)
        return [request.times for request in requests]

    def _begin(self, prompt: list[int], free: list[Sequence]) -> Request:
        """Take the free sequence that shares most; its last prompt token is computed anew."""
        best = max(free, key=lambda sequence: sequence.shares(prompt))
        free.remove(best)
        kept = min(best.shares(prompt), len(prompt) - 1)
        if not lib.llama_memory_seq_rm(self._memory, best.number, kept, -1):
            sys.exit("llama.cpp cannot forget a part of a sequence")
        del best.tokens[kept:]
        return Request(best, list(prompt))

    def _fill(self, running: list[Request]) -> list[Request]:
        """Fill the batch; returns those whose next token it gives, in the order of its logits."""
        self._batch.n_tokens = 0
        ready = []
        for request in sorted(running, key=lambda r: not r.times):
            chunk = request.missing[: self._budget - self._batch.n_tokens]
            if not chunk:
                continue
            whole = len(chunk) == len(request.missing)
            self._add(request.sequence, chunk, gives_logits=whole)
            if whole:
                ready.append(request)
        return ready

    def _add(self, sequence: Sequence, tokens: list[int], *, gives_logits: bool) -> None:
        batch = self._batch
        for token in tokens:
            at = batch.n_tokens
            batch.token[at] = token
            batch.pos[at] = len(sequence.tokens)
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence.number
            batch.logits[at] = 0
            batch.n_tokens = at + 1
            sequence.tokens.append(token)
        batch.logits[batch.n_tokens - 1] = gives_logits

    def _compute(self, rows: int) -> list[int]:
        """Compute the batch; the likeliest tokens of its ``rows`` rows of logits."""
        if (code := lib.llama_decode(self._context, self._batch)) != 0:
            sys.exit(f"llama_decode failed with code {code}")
        if not rows:
            return []
        logits = np.ctypeslib.as_array(
            lib.llama_get_logits(self._context), shape=(rows, self._vocabulary)
        )
        return [int(token) for token in logits.argmax(axis=1)]
