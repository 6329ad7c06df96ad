"""Expert workers, attention workers and the scheduler around one routing table, for tests over a real Redis."""

from __future__ import annotations

from typing import Any

from services.messages import ExpertInfo, SeatReport
from services.queue.expert_side import ExpertQueue
from services.queue.seats import SeatRegistry, SeatState
from services.queue.tables import TableReader, unused
from services.routing import RoutingTable, Seat, even_groups

GROUPS = even_groups([0, 1], 8, 2)
WAITING = SeatReport(status="waiting")
LEASE_S = 60.0


def expert(worker_id: str, fingerprint: str = "f") -> ExpertInfo:
    return ExpertInfo(
        id=worker_id, fingerprint=fingerprint, host="h", port=7100, memory_bytes=1 << 30, pid=1, version="0", node="n"
    )


def table(epoch: int, *seats: Seat) -> RoutingTable:
    return RoutingTable(epoch=epoch, fingerprint="f", num_experts=8, groups=GROUPS, seats=seats)


class Floor:
    """Expert workers, attention workers and the scheduler over one Redis. ``e`` is the leader's epoch."""

    def __init__(self, bench: Any) -> None:
        self.bench, self.redis, self.keys = bench, bench.redis, bench.keys
        self.experts = self.new_experts()
        self.registry = SeatRegistry(bench.user("scheduler"), bench.keys, bench.limits)
        self.reader = TableReader(bench.user("attention"), bench.keys, bench.limits)
        self.e = bench.epoch

    def new_experts(self) -> ExpertQueue:
        """A process of its own: it remembers nothing of the others."""
        return ExpertQueue(self.bench.user("experts"), self.keys, self.bench.limits)

    async def join(self, *workers: str) -> list[int]:
        return [await self.experts.join(expert(worker), LEASE_S) for worker in workers]

    async def seats(self) -> dict[str, SeatState]:
        return {state.info.id: state for state in await self.registry.seats()}

    async def publish(self, *workers: str) -> RoutingTable:
        """The next table, with ``workers`` in group 0."""
        seats = await self.seats()
        epoch = (await self.registry.table_epochs()).following
        made = table(epoch, *(seats[worker].seat(0) for worker in workers))
        await self.registry.publish_table(self.e, made)
        return made

    async def lapse(self, worker: str) -> None:
        await self.bench.expire_lease(self.keys.seats, worker)

    async def may_go(self, worker: str) -> bool:
        """Whether a leaving worker may end, asked as the worker itself does."""
        newest = await self.reader.read_table()
        orders = await self.experts.heartbeat(worker, SeatReport(status="leaving"))
        assert newest is not None
        return unused(newest, worker, orders.oldest_epoch)
