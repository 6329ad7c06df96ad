"""The attention role: an attention worker, by itself or as a rank of several in lock-step. Needs Redis and a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from services.attention.lockstep_service import LockstepService
from services.attention.service import AttentionService
from services.config import ATTENTION, Settings
from services.model.hub import with_checkpoint
from services.queue.role_service import run_role_service
from services.runtime import run_role
from services.runtime.tracing import tracing


async def attend(settings: Settings, stop: asyncio.Event) -> None:
    """Run an attention worker until ``stop``; then drain."""
    service = LockstepService if settings.layout == "lockstep" else AttentionService
    with tracing(settings, ATTENTION) as tracer:
        await run_role_service(ATTENTION, settings, stop, partial(service, settings, tracer=tracer))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the role."""
    return run_role(ATTENTION, attend, argv, prepare=with_checkpoint)
