"""A whole server on a GPU, as a user starts it, gives the recorded answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.pocket.answers import POCKET, assert_recorded, complete_all, recorded
from testkit.processes.servers import bench
from testkit.waiting import until

pytestmark = pytest.mark.gpu1


async def test_answers_are_the_recorded_ones(tmp_path: Path) -> None:
    wanted = recorded()
    with bench(tmp_path) as stage:
        server = stage.serve(
            POCKET / "model", served_model_name="pocket", dtype="float32", device="cuda:0", kv_blocks=2048,
            max_num_seqs=64, max_num_batched_tokens=512,
        )  # fmt: skip
        assert_recorded(wanted, await complete_all(server.url, wanted))
        until(lambda: server.metric("expertmesh_graph_steps_total") > 0, "steps by graph are counted")
