"""Steps of a scheduler on a Bench, and what they must give."""

from helpers.engine_workload import EOS, VOCAB_SIZE, Bench
from helpers.fake_runner import expected_tokens
from kvasir.worker.contracts import Request, StepPlan


def sizes(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def steps(bench: Bench) -> list[dict[str, int]]:
    """Run until nothing can be computed."""
    made = []
    while plan := sizes(bench.step()):
        made.append(plan)
    return made


def expected(request: Request) -> list[int]:
    return expected_tokens(request, VOCAB_SIZE, EOS)


def first_token(request: Request) -> int:
    return expected(request)[0]
