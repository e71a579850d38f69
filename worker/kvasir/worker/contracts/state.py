"""Engine -> service: news of the engine as a whole, which are its cached blocks and its load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks that can now be hit; ``parent_hash`` is empty at a root."""

    parent_hash: bytes
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    block_hashes: tuple[bytes, ...]


KvEvent = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True)
class KvUsage:
    """What the token slots of the KV blocks are good for at one moment.

    The first three are the slots of all blocks that sequences hold, a shared block counted once.
    After Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (SOSP 2023), section 3.1.
    """

    filled: int = 0
    reserved: int = 0
    """For tokens that are known and not computed yet."""
    internal: int = 0
    """Beyond all known tokens: internal fragmentation."""
    external: int = 0
    """Of blocks that are free and yet of no use, because no one takes so few of them."""
    table_entries: int = 0
    """Block ids in all block tables."""

    @property
    def waste(self) -> float:
        """Share of the slots taken out of use that is internal or external waste."""
        taken = self.filled + self.reserved + self.internal + self.external
        return (self.internal + self.external) / taken if taken else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Gauges and counters of an engine at one moment; units as in LoadReport of engine.proto.

    Every request that was accepted and is not over counts as running or waiting: from its
    acceptance on, while its KV is received, and while its blocks are held for another worker.
    """

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    active_kv_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    """Tokens of requests (prompts and, in replays, earlier output) that were computed here; again
    after a preemption. Those from the cache or from another worker are not."""
    busy_seconds: float = 0.0
    """Time in which the engine thread had work."""
    kv: KvUsage = KvUsage()
    drafts: int = 0
    """How often tokens were drafted for a sequence, counted once per step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were right."""


class EngineListener(Protocol):
    """Told after each step that changed something. On the engine thread; must not block."""

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None: ...

    def on_load(self, load: Load) -> None: ...
