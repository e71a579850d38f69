"""One worker as the fleet sees it: its session, what it said of itself, and its load."""

from dataclasses import dataclass, field

from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.contracts import WorkerStatus
from kvasir.router.cost import Group, Role, Standing
from kvasir.router.load import WorkerLoad
from kvasir.router.worker_link import WorkerLink


@dataclass(slots=True, eq=False)
class Member:
    """Mutable; owned by the Fleet. ``breaker_until`` is monotonic seconds."""

    worker_id: str
    address: str
    link: WorkerLink
    load: WorkerLoad = field(default_factory=WorkerLoad)
    info: pb.WorkerInfo | None = None
    """What the last session said; kept after it broke."""
    group: Group | None = None
    role: Role = "both"
    draining: bool = False
    """What it says of itself."""
    withheld: bool = False
    """Whether its source tells not to give it requests."""
    silent: bool = False
    objection: str = ""
    """Why it can serve nothing here, for as long as this router serves what it does."""
    breaker_until: float = 0.0
    report: pb.LoadReport = field(default_factory=pb.LoadReport)

    def standing(self, now: float) -> Standing:
        return Standing(
            role=self.role,
            connected=self.link.is_open,
            silent=self.silent,
            draining=self.is_leaving,
            breaker_open=now < self.breaker_until,
        )

    @property
    def is_leaving(self) -> bool:
        return self.draining or self.withheld

    @property
    def state(self) -> str:
        """connecting (never seen), ready, incompatible, draining or lost."""
        if self.info is None:
            return "connecting"
        if self.silent or not self.link.is_open:
            return "lost"
        if self.is_leaving:
            return "draining"
        return "incompatible" if self.objection else "ready"

    def status(self) -> WorkerStatus:
        report = self.report
        return WorkerStatus(
            worker_id=self.worker_id,
            address=self.address,
            role=self.role if self.info is not None else "",
            state=self.state,
            reason=self.objection,
            running=report.running,
            waiting=report.waiting,
            kv_blocks_total=report.kv_blocks_total,
            kv_blocks_used=report.kv_blocks_used,
            kv_blocks_cached=report.kv_blocks_cached,
            prefix_query_tokens=report.prefix_query_tokens,
            prefix_hit_tokens=report.prefix_hit_tokens,
            kv_slots_filled=report.kv_slots_filled,
            kv_slots_reserved=report.kv_slots_reserved,
            kv_slots_internal_waste=report.kv_slots_internal_waste,
            kv_slots_external_waste=report.kv_slots_external_waste,
            kv_block_table_entries=report.kv_block_table_entries,
            draft_tokens=report.draft_tokens,
            accepted_tokens=report.accepted_tokens,
        )

    def prefill_peer(self) -> pb.PrefillPeer:
        """How a decode worker finds this one."""
        info = self.info or pb.WorkerInfo()
        return pb.PrefillPeer(
            worker_id=self.worker_id,
            address=info.transfer_address or self.address,
            epoch=info.epoch,
        )
