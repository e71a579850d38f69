"""vLLM's engine behind the JSON lines of this package.

Run by the Python of vLLM's own environment, never by Kvasir's: it imports vllm and the
standard library only.
"""

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = _take_stdout()
    vllm: Any = importlib.import_module("vllm")  # after stdout is taken: its import prints
    engine = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_batched_tokens=settings["max_batched_tokens"],
        max_num_seqs=settings["max_requests"],
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    ).llm_engine
    _say(out, {"ready": True, "version": vllm.__version__})
    for number, line in enumerate(sys.stdin):
        work = json.loads(line)
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=work["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        _say(out, {"times": _generate(engine, number, work["prompts"], params)})


def _generate(engine: Any, number: int, prompts: list[list[int]], params: Any) -> list[list[float]]:
    times: dict[str, list[float]] = {f"{number}-{i}": [] for i in range(len(prompts))}
    start = time.perf_counter()
    for request_id, prompt in zip(times, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            seen = times[output.request_id]
            new = len(output.outputs[0].token_ids) - len(seen)
            seen.extend([now] * new)
    return list(times.values())


def _take_stdout() -> TextIO:
    """Keep stdout for messages; whatever vLLM prints goes to stderr."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return messages


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
