"""Where one generation goes: the choice applied to the fleet, and the charge it makes."""

import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.proto.blocks import block_hashes, cacheable_blocks
from kvasir.router.config import Disaggregation
from kvasir.router.contracts import Generation
from kvasir.router.cost import (
    DECODE_WEIGHTS,
    PREFILL_WEIGHTS,
    Decision,
    Group,
    PrefillWork,
    choose,
    disaggregate,
)
from kvasir.router.fleet import Fleet
from kvasir.router.member import Member
from kvasir.router.metrics import HeldRole


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice made and charged under ``wire_id``."""

    wire_id: str
    siblings: str
    """Group of the generation."""
    group: Group
    decode: Member
    prefill: Member | None
    """Computes the prompt; None: the decode worker does."""
    decision: Decision
    chain: Sequence[bytes]
    """Block hashes of all tokens to compute."""

    @property
    def members(self) -> tuple[Member, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


@dataclass(slots=True)
class _Home:
    """Where the generations of one group are: the worker of the latest one."""

    worker: str
    wire_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The tokens to compute, with their chain for one block size."""

    num_tokens: int
    chain: list[bytes]
    cached: dict[str, int]
    """Worker -> leading tokens in its cache."""

    def uncached(self, worker: str) -> int:
        return self.num_tokens - self.cached.get(worker, 0)


class Placer:
    """Chooses workers for generations and keeps their loads charged.

    The generations of a group share the prompt's KV if they meet on one worker, so each follows
    those before it, whatever that costs, unless their worker may not be chosen any more.
    """

    def __init__(self, fleet: Fleet, settings: Disaggregation, rng: random.Random) -> None:
        self._fleet = fleet
        self._settings = settings
        self._rng = rng
        self._homes: dict[str, _Home] = {}

    def place(
        self,
        generation: Generation,
        wire_id: str,
        output_ids: Sequence[int],
        *,
        began: Group | None,
        exclude: Container[str],
        alone: bool,
    ) -> Placement | None:
        """Choose and charge. None: no eligible worker outside ``exclude``.

        Args:
            generation: what to serve.
            wire_id: names this attempt.
            output_ids: tokens already given, computed like prompt tokens.
            began: group of the worker that gave them; None for a new request.
            exclude: workers that are not to decode it.
            alone: without a prefill worker.
        """
        prompts: dict[int, _Prompt] = {}
        best: tuple[float, Group, str] | None = None
        for group, loads in self._decode_groups(generation, began, exclude):
            prompt = prompts.get(group.block_size)
            if prompt is None:
                prompt = self._prompt(generation, output_ids, group.block_size)
                prompts[group.block_size] = prompt
            found = choose(loads, prompt.cached, DECODE_WEIGHTS.uncached, self._rng, exclude)
            if found is not None and (best is None or found[1] < best[0]):
                best = (found[1], group, found[0])
        if best is None:
            return None
        _, group, worker = best
        prompt = prompts[group.block_size]
        decode = self._fleet.member(worker)
        prefill, decision = None, Decision.LOCAL_OFF
        if not alone:
            prefill, decision = self._prefill_worker(generation, group, decode, prompt)
        placement = Placement(
            wire_id, generation.group, group, decode, prefill, decision, prompt.chain
        )
        self._settle(placement)
        self._charge(placement, prompt)
        self.speculate(placement)
        return placement

    def roles_of(self, generation: Generation) -> tuple[HeldRole, ...]:
        """The roles whose workers would serve it if none had any of its prompt cached."""
        settings, num_tokens = self._settings, len(generation.prompt_ids)
        long = settings.mode == "auto" and num_tokens >= settings.min_uncached_tokens
        alone = generation.sampling.prompt_logprobs is not None
        if not alone and (long or settings.mode == "always"):
            return ("prefill", "decode")
        return ("decode",)

    def computed(self, placement: Placement) -> None:
        """The prompt is computed: its first token is here."""
        if placement.prefill is not None:
            placement.prefill.load.release(placement.wire_id)
            self._fleet.refresh(placement.prefill)
        placement.decode.load.computed(placement.wire_id)
        self._fleet.refresh(placement.decode)

    def release(self, placement: Placement) -> None:
        """The attempt is over, however it went. Idempotent."""
        for member in placement.members:
            member.load.release(placement.wire_id)
            self._fleet.refresh(member)
        home = self._homes.get(placement.siblings)
        if home is not None:
            home.wire_ids.discard(placement.wire_id)
            if not home.wire_ids:
                del self._homes[placement.siblings]

    def speculate(self, placement: Placement) -> None:
        """The workers are going to hold the prompt: prompts with its prefix may follow it."""
        for member in placement.members:
            self._fleet.index.speculate(member.worker_id, placement.chain)

    def _decode_groups(
        self, generation: Generation, began: Group | None, exclude: Container[str]
    ) -> Sequence[tuple[Group, Mapping[str, float]]]:
        """Eligible workers: the one of the generation's siblings alone, if that is one of them."""
        groups = self._fleet.decode_groups(began)
        home = self._homes.get(generation.group)
        if home is None or home.worker in exclude:
            return groups
        worker = home.worker
        return [(g, {worker: loads[worker]}) for g, loads in groups if worker in loads] or groups

    def _settle(self, placement: Placement) -> None:
        """Generations of the same group are to follow this one."""
        if placement.siblings:
            worker = placement.decode.worker_id
            home = self._homes.setdefault(placement.siblings, _Home(worker))
            home.worker = worker
            home.wire_ids.add(placement.wire_id)

    def _prompt(
        self, generation: Generation, output_ids: Sequence[int], block_size: int
    ) -> _Prompt:
        tokens = (*generation.prompt_ids, *output_ids)
        chain = block_hashes(tokens, block_size, generation.cache_salt)
        usable = chain[: cacheable_blocks(len(tokens), block_size)]
        if generation.sampling.prompt_logprobs is not None and not output_ids:
            usable = []  # logprobs of the prompt need all of it computed
        depths = self._fleet.index.match(usable)
        return _Prompt(len(tokens), chain, {w: n * block_size for w, n in depths.items()})

    def _prefill_worker(
        self, generation: Generation, group: Group, decode: Member, prompt: _Prompt
    ) -> tuple[Member | None, Decision]:
        if generation.sampling.prompt_logprobs is not None:
            return None, Decision.LOCAL_OFF  # they do not travel between workers
        loads = self._fleet.pools.prefill(group)
        found = choose(loads, prompt.cached, PREFILL_WEIGHTS.uncached, self._rng)
        member = None if found is None else self._fleet.member(found[0])
        decision = disaggregate(
            self._settings.mode,
            self._settings.min_uncached_tokens,
            _work(decode, prompt),
            None if member is None else _work(member, prompt),
        )
        return (member if decision is Decision.REMOTE else None), decision

    def _charge(self, placement: Placement, prompt: _Prompt) -> None:
        """Who computes is charged the computing; who decodes, the KV; both will hold it."""
        decode, prefill = placement.decode, placement.prefill
        uncached = prompt.uncached(decode.worker_id)
        decode.load.charge(
            placement.wire_id,
            prefill_tokens=uncached if prefill is None else 0,
            kv_tokens=prompt.num_tokens,
            new_tokens=uncached,
        )
        if prefill is not None:
            uncached = prompt.uncached(prefill.worker_id)
            prefill.load.charge(
                placement.wire_id,
                prefill_tokens=uncached,
                kv_tokens=prompt.num_tokens,
                new_tokens=uncached,
            )
        for member in placement.members:
            self._fleet.refresh(member)


def _work(member: Member, prompt: _Prompt) -> PrefillWork:
    return PrefillWork(member.load.queued_prefill_tokens, prompt.uncached(member.worker_id))
