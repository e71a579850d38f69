"""A runner that computes nothing, for figures of the scheduler alone."""

from kvasir.worker.contracts import Computed, Sampled, StepPlan, StepResult


class InstantRunner:
    """Each token that is asked for is the same one."""

    def execute(self, plan: StepPlan) -> StepResult:
        return {
            chunk.request_id: Computed((Sampled(token_id=1),) * len(chunk.samples))
            for chunk in plan.chunks
        }
