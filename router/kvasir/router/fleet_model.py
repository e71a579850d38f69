"""Which model a router serves: the choice among those of its workers, its card and tokenizer.

Invariants
- One model is served: the first one seen, until other workers alone take requests.
- Files that ``tokenizer_files`` gives are those of the model that ``card`` names at that moment.
"""

import asyncio
import logging
from collections.abc import Mapping

from kvasir.router.contracts import ModelCard
from kvasir.router.cost import Group
from kvasir.router.member import Member

log = logging.getLogger("kvasir.router")


class FleetModel:
    """The model of the fleet that has these ``members``, which the fleet goes on changing."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._served: Group | None = None
        self._card: ModelCard | None = None
        self._tokenizers: dict[str, dict[str, bytes]] = {}
        self._fetching = asyncio.Lock()

    def is_served(self, group: Group) -> bool:
        return self._served is not None and _same(group, self._served)

    def objection(self, group: Group) -> str:
        """Why workers of this group are not used; empty if they are."""
        if self._served is None or self.is_served(group):
            return ""
        if group.model != self._served.model:
            return f"has model {group.model!r}; this router serves {self._served.model!r}"
        return f"has another tokenizer than the model {group.model!r} that this router serves"

    def settle(self) -> None:
        """After any change among the members: serve another model if it is time to.

        A worker that is only lost may come back; one that drains, or has left, does not count, and
        neither does one that cannot decode where another one can.
        """
        staying = [m for m in self._members.values() if not m.is_leaving]
        decoding = [m.group for m in staying if m.group is not None and m.role != "prefill"]
        takers = decoding or [m.group for m in staying if m.group is not None]
        if takers and not any(self.is_served(group) for group in takers):
            self._served = takers[0]
            log.info("serving model=%s", takers[0].model)

    def card(self) -> ModelCard | None:
        """The served model; what was last known while none of its workers is connected."""
        infos = [
            member.info
            for member in self._members.values()
            if member.info is not None and member.group is not None and self.is_served(member.group)
        ]
        if infos:
            self._card = ModelCard(
                name=infos[0].model,
                max_model_len=min(info.max_model_len for info in infos),
                vocab_size=min(info.vocab_size for info in infos),
                block_size=infos[0].layout.block_size,
                tokenizer_hash=infos[0].tokenizer_hash,
            )
        return self._card

    async def tokenizer_files(self) -> dict[str, bytes] | None:
        """Fetched once for each tokenizer hash; None while no worker can be asked."""
        async with self._fetching:
            served = self._served
            if served is None:
                return None
            if served.tokenizer_hash not in self._tokenizers:
                files = await self._fetch(served)
                if files is None:
                    return None
                self._tokenizers[served.tokenizer_hash] = files
            # Another model may be served since the files were asked for.
            return self._tokenizers[served.tokenizer_hash] if self.is_served(served) else None

    async def _fetch(self, wanted: Group) -> dict[str, bytes] | None:
        for member in list(self._members.values()):
            if member.group is not None and _same(member.group, wanted):
                files = await member.link.fetch_tokenizer()
                if files is not None and _same(member.group, wanted):
                    return files
        return None


def _same(one: Group, other: Group) -> bool:
    """Whether their workers may serve as one: KV may differ, tokens may not."""
    return (one.model, one.tokenizer_hash) == (other.model, other.tokenizer_hash)
