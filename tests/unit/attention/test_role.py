"""The attention role: which service it runs."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from services.attention import role
from services.attention.lockstep_service import LockstepService
from services.attention.service import AttentionService
from services.config import Settings


@pytest.mark.parametrize(
    ("layout", "service"),
    [("local", AttentionService), ("disaggregated", AttentionService), ("lockstep", LockstepService)],
)
async def test_the_layout_chooses_the_service(
    monkeypatch: pytest.MonkeyPatch, layout: str, service: type[AttentionService]
) -> None:
    made: list[object] = []

    async def run(_role: str, _settings: Settings, _stop: asyncio.Event, make: partial[AttentionService]) -> None:
        made.append(make.func)

    monkeypatch.setattr(role, "run_role_service", run)
    await role.attend(Settings(model="m", layout=layout), asyncio.Event())  # type: ignore[arg-type]
    assert made == [service]
