"""Who takes part in `kvasir bench engine`: forms of our own engine, rivals, and the way through
the router. Starts them and ends them; what is not there is told, not an error.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvasir.bench.engine import WHOLE_RUNS, Contender, EngineLostError, RequestsFailedError
from kvasir.bench.reference import huggingface_folder
from kvasir.bench.rival import (
    LLAMA_CPP,
    STORED,
    Installation,
    Rival,
    RivalError,
    RivalSettings,
    find_rival,
)
from kvasir.bench.through_router import RouterEngine, router_engine
from kvasir.bench.timeline import Timeline
from kvasir.bench.trial import Trial, trial
from kvasir.bench.workload import Prompt, RequestSpec
from kvasir.worker.config import WorkerConfig
from kvasir.worker.limits import scheduler_config
from kvasir.worker.loader import LoadedModel, load_model
from kvasir.worker.model.gguf_file import GgufReader
from kvasir.worker.model.gguf_types import type_of
from kvasir.worker.model.source import locate

FULL = "full"
FORMS: Mapping[str, Mapping[str, str]] = {
    FULL: {},
    "int8": {"quantization": "int8"},
    "int8-a8": {"quantization": "int8", "activation_quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Fields of WorkerConfig for each way to hold the model."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Who is to take part. ``config`` has the model, dtype, threads and limits of all.

    ``forms``: keys of FORMS, at least one. ``against``: rivals' names. ``rivals``: where they are
    installed; ``rival_limit_s``: how long one may take to start or to answer; ``cache``: where the
    model goes in the layout that vLLM reads. ``through_router``: also ask a worker of the first
    form over HTTP.
    """

    config: WorkerConfig
    forms: Sequence[str]
    against: Sequence[str]
    rivals: Path
    rival_limit_s: float
    cache: Path
    through_router: bool


@dataclass(frozen=True, slots=True)
class Lineup:
    """Everyone who takes part, ready. ``config`` is what all have in common.

    ``versions`` of the rivals; ``absent``: why a rival that was asked for takes no part; ``lost``:
    why one that took part answers nothing any more, filled in when it happens.
    """

    config: WorkerConfig
    contenders: Sequence[Contender]
    versions: Mapping[str, str]
    absent: Mapping[str, str]
    lost: Mapping[str, str]
    dtype: str
    vocab_size: int
    router: RouterEngine | None


@contextmanager
def lineup(wanted: Wanted, say: Say) -> Iterator[Lineup]:
    """Start everyone; end everyone afterwards.

    Raises:
        ModelError, MissingReferenceError: the model cannot be loaded.
        RivalError, StackError: a process did not start.
    """
    with ExitStack() as stack:
        gathering = _Gathering(stack, wanted, say)
        loaded = [gathering.add_form(form) for form in wanted.forms]
        dtype = loaded[0].layout.dtype
        for name in wanted.against:
            gathering.add_rival(name, dtype)
        router = gathering.add_router() if wanted.through_router else None
        yield Lineup(
            config=wanted.config,
            contenders=gathering.contenders(),
            versions=gathering.versions,
            absent=gathering.absent,
            lost=gathering.lost,
            dtype=dtype,
            vocab_size=loaded[0].vocab_size,
            router=router,
        )


class KvasirEngine:
    """Our engine as a Generator, on the scheduler and runner that a worker would use."""

    def __init__(self, running: Trial) -> None:
        self._running = running

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        specs = [RequestSpec(Prompt(tuple(prompt)), max_tokens) for prompt in prompts]
        records = self._running.run(specs)
        if failures := [record.failure for record in records if record.failure is not None]:
            raise RequestsFailedError(failures)
        start = records[0].sent
        return Timeline(tuple(tuple(at - start for at in each.token_times) for each in records))


class RivalEngine:
    """A rival as a Generator. Why it was lost goes into ``lost``, under ``name``."""

    def __init__(self, name: str, rival: Rival, lost: dict[str, str]) -> None:
        self._name = name
        self._rival = rival
        self._lost = lost

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        try:
            return self._rival.generate(prompts, max_tokens)
        except RivalError as error:
            self._lost[self._name] = str(error)
            raise EngineLostError([f"{self._name} is lost"] * len(prompts)) from error


@contextmanager
def kvasir_engine(config: WorkerConfig, say: Say) -> Iterator[tuple[KvasirEngine, LoadedModel]]:
    """Our engine, running on the configured model."""
    loaded = load_model(config, say)
    with trial(loaded.runner, scheduler_config(config, loaded)) as running:
        yield KvasirEngine(running), loaded


@dataclass(slots=True)
class _Gathering:
    """Those who have come so far. ``stack`` ends them."""

    stack: ExitStack
    wanted: Wanted
    say: Say
    ours: dict[str, Contender] = field(default_factory=dict)
    rivals: list[Contender] = field(default_factory=list)
    quantized_rivals: list[Contender] = field(default_factory=list)
    routed: list[Contender] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def add_form(self, form: str) -> LoadedModel:
        config = self.wanted.config.model_copy(update=FORMS[form])
        engine, loaded = self.stack.enter_context(kvasir_engine(config, self.say))
        name = f"kvasir {loaded.layout.dtype if form == FULL else form}"
        self.ours[form] = Contender(name, engine)
        return loaded

    def add_rival(self, name: str, dtype: str) -> None:
        installation = find_rival(name, self.wanted.rivals)
        if installation is None:
            self.absent[name] = (
                f"it is not installed in {self.wanted.rivals}; deploy/dev/rivals.sh installs it"
            )
        elif name == LLAMA_CPP:
            self._add_llama_cpp(installation, dtype)
        else:
            model = huggingface_folder(self.wanted.config.model, self.wanted.cache)
            self.rivals.append(self._start(name, installation, model, dtype))

    def _add_llama_cpp(self, installation: Installation, dtype: str) -> None:
        """The same weights in ``dtype``; beside quantized forms of ours also the file as it is."""
        path = locate(self.wanted.config.model)
        if path.suffix != ".gguf":
            self.absent[LLAMA_CPP] = "it needs a model that is a .gguf file"
            return
        self.rivals.append(self._start(LLAMA_CPP, installation, path, dtype))
        stored = most_stored_type(path)
        if stored.startswith("Q") and set(self.ours) != {FULL}:
            name = f"{LLAMA_CPP} {stored}"
            self.quantized_rivals.append(self._start(name, installation, path, STORED))

    def _start(self, name: str, installation: Installation, model: Path, dtype: str) -> Contender:
        self.say(f"starting {name}, which may take a minute or two")
        config = self.wanted.config
        settings = RivalSettings(
            model=str(model),
            dtype=dtype,
            max_model_len=config.max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_requests=config.max_running_requests,
            threads=config.threads,
        )
        rival = Rival(installation, settings, self.wanted.rival_limit_s)
        self.stack.enter_context(rival)
        self.versions[name] = rival.version
        return Contender(name, RivalEngine(name, rival, self.lost))

    def add_router(self) -> RouterEngine:
        """The first form behind a router, compared with the same form in this process."""
        self.say("starting a worker and a router")
        form, inside = next(iter(self.ours.items()))
        config = self.wanted.config.model_copy(update=FORMS[form])
        engine = self.stack.enter_context(router_engine(config))
        name = f"{inside.name} via router"
        self.routed.append(Contender(name, engine, (inside.name,), WHOLE_RUNS))
        return engine

    def contenders(self) -> list[Contender]:
        """Ours first. Quantized rivals are a match for quantized forms only."""
        equal = tuple(rival.name for rival in self.rivals)
        smaller = tuple(rival.name for rival in self.quantized_rivals)
        ours = [
            replace(each, against=equal if form == FULL else equal + smaller)
            for form, each in self.ours.items()
        ]
        return [*ours, *self.rivals, *self.quantized_rivals, *self.routed]


def most_stored_type(path: Path) -> str:
    """The type, such as Q4_1, of most values of a GGUF file."""
    values: Counter[str] = Counter()
    for tensor in GgufReader(path).tensors.values():
        values[type_of(tensor).name] += math.prod(tensor.shape)
    return values.most_common(1)[0][0]
