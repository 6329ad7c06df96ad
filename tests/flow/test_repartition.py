"""The groups are partitioned again while answers stream: no token changes, and every expert keeps a seat."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis
from testkit.pocket.answers import POCKET, assert_recorded, complete_all, recorded
from testkit.processes.servers import bench, free_port
from testkit.waiting import until

from services.routing import RoutingTable, decode_table

TIMEOUT_S = 300
UNEVEN = "verse"
"""The domain whose rows are spread least evenly over the two groups, layer by layer: most others are within what a cut
has to save (records/load.json)."""

pytestmark = [pytest.mark.alone, pytest.mark.night]


def table_of(client: redis.Redis) -> RoutingTable:
    ((_, fields),) = client.xrange("{expertmesh}:table")
    return decode_table(fields[b"t"])


async def ask_until_partitioned_again(url: str, client: redis.Redis) -> list[RoutingTable]:
    """Every table seen on the way."""
    wanted = [record for record in recorded() if record["domain"] == UNEVEN]
    tables = [table_of(client)]
    asking = asyncio.create_task(complete_all(url, wanted, at_once=32))
    end = time.monotonic() + TIMEOUT_S
    while tables[-1].groups == tables[0].groups or len(tables[-1].seats) < len(tables[0].seats) or not asking.done():
        assert time.monotonic() < end, "the groups stayed as they were"
        await asyncio.sleep(0.05)
        if asking.done():
            assert_recorded(wanted, asking.result())
            if tables[-1].groups == tables[0].groups:
                asking = asyncio.create_task(complete_all(url, wanted, at_once=32))
        if (table := table_of(client)).epoch > tables[-1].epoch:
            tables.append(table)
    return tables


def test_no_token_changes_while_the_groups_are_partitioned_again(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        port = free_port()
        stage.redis(port=port)
        server = stage.serve(
            POCKET / "model",
            served_model_name="pocket",
            redis_url=f"redis://127.0.0.1:{port}/0",
            dtype="float32",
            threads=1,
            layout="disaggregated",
            expert_workers=4,
            expert_groups=2,
            rebalance_after=1,
        )
        until(lambda: server.metric("expertmesh_expert_seats") == 4, "all seats are listed")
        with redis.Redis(port=port) as client:
            tables = asyncio.run(ask_until_partitioned_again(server.url, client))
        server.proc.stop()
    for table in tables:
        assert all(table.seats_of.values()), f"a group of table {table.epoch} has no seat"
