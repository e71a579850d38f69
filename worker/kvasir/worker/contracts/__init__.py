"""What the parts of a worker say to each other: frozen data and narrow protocols.

    service (asyncio)  --Request, Abort-->  Engine (its own thread)
                       <--Output, KvEvent, Load--
    Engine: Scheduler.plan() -> StepPlan -> Runner.execute() -> StepResult -> Scheduler.update()

The scheduler and what it owns know nothing of torch; the runner knows nothing of requests,
queues or sharing: it computes the chunks that a plan names. Nothing here does I/O. All names are
imported from this package, wherever they are defined in it.
"""

from kvasir.worker.contracts.output import (
    Finish,
    HoldSink,
    Hypothesis,
    Output,
    OutputSink,
    PrefillOutcome,
    PrefillReport,
    ReceiveSink,
)
from kvasir.worker.contracts.request import BeamParams, Request, Work
from kvasir.worker.contracts.state import (
    BlocksRemoved,
    BlocksStored,
    EngineListener,
    KvEvent,
    KvUsage,
    Load,
)
from kvasir.worker.contracts.step import (
    BlockCopy,
    Chunk,
    Computed,
    Runner,
    Sampled,
    SampleSpec,
    StepPlan,
    StepResult,
)

__all__ = [
    "BeamParams",
    "BlockCopy",
    "BlocksRemoved",
    "BlocksStored",
    "Chunk",
    "Computed",
    "EngineListener",
    "Finish",
    "HoldSink",
    "Hypothesis",
    "KvEvent",
    "KvUsage",
    "Load",
    "Output",
    "OutputSink",
    "PrefillOutcome",
    "PrefillReport",
    "ReceiveSink",
    "Request",
    "Runner",
    "SampleSpec",
    "Sampled",
    "StepPlan",
    "StepResult",
    "Work",
]
