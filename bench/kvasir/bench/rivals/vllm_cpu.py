"""vLLM's engine, for run.py.

Run by the Python of vLLM's own environment, never by Kvasir's: it imports vllm and the
standard library only.
"""

import importlib
import time
from itertools import count
from typing import Any


class Rival:
    """The engine on its model, ready."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._engine = self._vllm.LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_batched_tokens=settings["max_batched_tokens"],
            max_num_seqs=settings["max_requests"],
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        ).llm_engine
        self._numbers = count()
        self.version: str = self._vllm.__version__

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Seconds from now to each greedy token, for each prompt."""
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        times: dict[str, list[float]] = {str(next(self._numbers)): [] for _ in prompts}
        start = time.perf_counter()
        for request_id, prompt in zip(times, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                seen = times[output.request_id]
                new = len(output.outputs[0].token_ids) - len(seen)
                seen.extend([now] * new)
        return list(times.values())
