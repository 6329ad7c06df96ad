"""Expert workers that are killed under `serve`: the table is without them long before their leases end, and what is
started in their place holds their group again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import redis
from testkit.pocket.answers import answers_while, serve_pocket
from testkit.processes.servers import Server, bench, free_port
from testkit.waiting import until

from services.routing import RoutingTable, decode_table

LEASE_S = 60.0
WORKERS, GROUPS = 4, 2

pytestmark = pytest.mark.alone


class Deployment:
    def __init__(self, server: Server, redis_port: int) -> None:
        self.server, self._redis_port = server, redis_port

    def table(self) -> RoutingTable | None:
        with redis.Redis(port=self._redis_port) as client:
            entries = client.xrevrange("{expertmesh}:table", count=1)
            return decode_table(entries[0][1][b"t"]) if entries else None

    def seats(self) -> dict[int, int]:
        """Groups of the seats that the table lists."""
        table = self.table()
        return {seat.number: seat.group for seat in table.seats} if table else {}

    def whole(self) -> bool:
        return Counter(self.seats().values()) == dict.fromkeys(range(GROUPS), WORKERS // GROUPS)


@pytest.fixture
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with bench(tmp_path_factory.mktemp("deaths")) as stage:
        port = free_port()
        stage.redis(port=port)
        options = {"lease": LEASE_S, "expert_workers": WORKERS, "expert_groups": GROUPS, "layout": "disaggregated"}
        server = serve_pocket(stage, redis_url=f"redis://127.0.0.1:{port}/0", **options)
        yield Deployment(server, port)


def test_a_dead_seat_leaves_at_once_and_its_group_is_whole_again(deployment: Deployment) -> None:
    until(deployment.whole, "each group has its replicas")
    for _ in range(3):
        one_dies(deployment)


def one_dies(deployment: Deployment) -> None:
    before = deployment.seats().keys()
    victim, began = deployment.server.of_role("experts")[0], time.monotonic()

    def kill() -> None:
        victim.kill()
        until(lambda: not before <= deployment.seats().keys(), "the table is without the dead seat")

    asyncio.run(answers_while(deployment.server, kill))
    left = WORKERS - 1
    until(lambda: deployment.whole() and len(before & deployment.seats().keys()) == left, "another one is in its place")
    assert time.monotonic() - began < LEASE_S, "nobody waited for a lease to end"
