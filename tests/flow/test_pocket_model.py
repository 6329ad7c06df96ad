"""The pocket model, served, gives the recorded answers: the reference's greedy tokens, 200 prompts at once, as text."""

from __future__ import annotations

import asyncio

from testkit.pocket.answers import assert_recorded, complete_all, recorded
from testkit.processes.servers import Server


def test_recorded_answers(pocket: Server) -> None:
    wanted = recorded()
    assert len(wanted) == 200
    assert_recorded(wanted, asyncio.run(complete_all(pocket.url, wanted)))
