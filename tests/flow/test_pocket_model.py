"""The pocket model, served, gives the recorded answers: the reference's greedy tokens, 200 prompts at once, as text."""

from __future__ import annotations

import asyncio
from pathlib import Path

from testkit.pocket_answers import POCKET, assert_recorded, complete_all, recorded
from testkit.servers import bench


def test_recorded_answers(tmp_path: Path) -> None:
    wanted = recorded()
    assert len(wanted) == 200
    with bench(tmp_path) as stage:
        server = stage.serve(POCKET / "model", served_model_name="pocket", dtype="float32")
        assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted)))
