"""An attention worker's credit: the last one that Redis gets is the one that holds."""

from __future__ import annotations

import asyncio
from typing import Any

from testkit.processes.background import ended
from testkit.processes.roles import OPTIONS

from services.attention.registration import LOOK_S, Registration


class SlowQueue:
    """Giving credit takes until ``may``; ``credits`` are in the order in which Redis would get them."""

    def __init__(self) -> None:
        self.credits: list[int] = []
        self.giving = asyncio.Event()
        self.may = asyncio.Event()

    async def register(self, _info: object, _lease_s: float, *, credit_tokens: int, credit_requests: int) -> None:
        if credit_tokens:
            self.giving.set()
            await self.may.wait()
        self.credits.append(credit_requests)


async def test_a_worker_that_drains_while_its_experts_come_back_gets_no_credit() -> None:
    queue, lacks = SlowQueue(), ["experts of group 0"]
    info: Any = type("Info", (), {"id": "w", "model": "m"})
    credit = OPTIONS.credit_tokens, OPTIONS.credit_requests
    registration = Registration(info, queue, lease_s=1.0, credit=credit, lacks=lambda: lacks)  # type: ignore[arg-type]
    await registration.enter(_nothing)
    keeping = asyncio.create_task(registration.keep(_nothing))
    lacks.clear()
    await asyncio.wait_for(queue.giving.wait(), 20)
    withdrawing = asyncio.create_task(registration.withdraw())
    await asyncio.sleep(LOOK_S)
    queue.may.set()
    await withdrawing
    await asyncio.sleep(LOOK_S)
    await ended([keeping])
    assert queue.credits == [0, OPTIONS.credit_requests, 0]


async def _nothing() -> None:
    pass
