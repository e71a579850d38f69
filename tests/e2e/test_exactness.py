"""Greedy tokens are those of `transformers`, however they are served and whatever is killed.

The scenarios are those of `kvasir bench exact`, which takes real prompts by path; here they
run on prompts written for the tests. A scenario whose fault did not happen fails.
"""

from dataclasses import dataclass

import pytest

from kvasir.bench.exact import Case, Oracle, build_cases, run_scenario
from kvasir.bench.reference import load_reference
from kvasir.bench.scenarios import SCENARIOS, Setup

MODEL = "bundled://smollm2-135m-instruct"
MAX_TOKENS = 24

TEXTS = (
    "The recipe says: melt the butter, add the flour, and",
    "Question: Ann has 3 boxes with 12 pencils each and gives 7 pencils away. "
    "How many pencils does she keep?\nAnswer:",
    "Minutes of the harbor council. " + "The crane was inspected and found to be in order. " * 14,
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n" * 9
    + "def multiply(a, b):",
    "Dear Sir or Madam, " + "we thank you for your letter about the garden fence. " * 24,
    "A list of rivers: the Danube, the Rhine, the Elbe, the Oder, the Vistula, the Loire. " * 12
    + "A list of mountains:",
)


@dataclass(frozen=True)
class Prepared:
    setup: Setup
    cases: list[Case]
    oracle: Oracle


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    reference = load_reference(MODEL)
    prompts = [reference.encode(text) for text in TEXTS]
    cases = build_cases(prompts, MAX_TOKENS, reference, progress=lambda _: None)
    setup = Setup(MODEL, MAX_TOKENS, max(map(len, prompts)), reference.kv_bytes_per_token)
    return Prepared(setup, cases, Oracle(reference))


@pytest.mark.parametrize("name", SCENARIOS)
async def test_tokens_equal_the_reference(prepared: Prepared, name: str) -> None:
    result = await run_scenario(
        name, SCENARIOS[name], prepared.setup, prepared.cases, prepared.oracle
    )
    assert result.ok, result.mistakes
    assert result.equal + result.ties == len(TEXTS)
