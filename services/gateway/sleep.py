"""Sleep and wake of the whole model: who may order it, and waiting until all workers have done it.

In: an order of a caller with the right ``admin``. Out: the order in Redis, which workers follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from starlette.datastructures import QueryParams
from starlette.requests import Request

from services.errors import Forbidden, InvalidRequest, NotFound, QueueUnavailable, UnsupportedParameter
from services.gateway.auth import Authenticator
from services.gateway.recent import Recent
from services.queue.sleep import AWAKE, LEVELS, Sleep

WAIT = "wait"
"""The one mode: requests end, or go on after the sleep."""
WAIT_S = 600.0
"""The longest time that an answer waits for workers; the order holds on."""
LOOK_S = 0.2
PROBE_S = 0.5
"""How long a probe waits for Redis before it is answered without."""
_LOOKS_PER_S = 4.0

log = logging.getLogger(__name__)


class Switch(Protocol):
    """See :class:`services.queue.sleep.SleepSwitch`."""

    async def order(self, level: int) -> int: ...

    async def look(self) -> Sleep: ...


class SleepOrders:
    """Orders of callers. ``enabled``: --enable-sleep-mode. ``leaving`` says whether this gateway ends."""

    def __init__(
        self,
        switch: Switch,
        authenticator: Authenticator,
        *,
        enabled: bool,
        leaving: Callable[[], bool] = lambda: False,
        wait_s: float = WAIT_S,
    ) -> None:
        self._switch, self._authenticator, self._enabled = switch, authenticator, enabled
        self._leaving, self._wait_s = leaving, wait_s
        self._recent = Recent(switch.look, _LOOKS_PER_S)

    async def sleep(self, request: Request, authorization: str | None) -> Sleep:
        """Orders sleep; returns how far it is, once all workers sleep or after :data:`WAIT_S`.

        Raises:
            NotFound, Unauthorized, Forbidden: the caller may not, or nobody may.
            InvalidRequest: there is no such level, or there is more than a level.
        """
        caller = await self._admin(authorization)
        await _refuse_body(request)
        return await self._settled(_level(request.query_params), caller)

    async def wake_up(self, request: Request, authorization: str | None) -> Sleep:
        """Orders to wake up; like :meth:`sleep`."""
        caller = await self._admin(authorization)
        await _refuse_body(request)
        _refuse_parts(request.query_params)
        return await self._settled(AWAKE, caller)

    async def look(self, authorization: str | None) -> Sleep:
        """Returns how it is. Raises like :meth:`sleep`; any key will do."""
        self._check_enabled()
        await self._authenticator.identify(authorization)
        return await self._recent.get()

    async def sleeping(self) -> bool:
        """Says whether requests wait for a wake-up, as far as Redis answers; for probes."""
        if self._enabled:
            with suppress(QueueUnavailable, TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    return (await self._recent.get()).sleeping
        return False

    async def _settled(self, level: int, caller: str) -> Sleep:
        ordered = await self._switch.order(level)
        log.info("the model is to %s", f"sleep at level {ordered}" if ordered else "wake up", extra={"tenant": caller})
        found = await self._switch.look()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while found.behind and not self._leaving():
                    await asyncio.sleep(LOOK_S)
                    found = await self._switch.look()
        return found

    async def _admin(self, authorization: str | None) -> str:
        self._check_enabled()
        caller = await self._authenticator.identify(authorization)
        if not caller.admin:
            raise Forbidden(
                "This API key may not send the model to sleep or wake it.",
                hint="Use one with that right: expertmesh keys create NAME --admin.",
            )
        return caller.tenant

    def _check_enabled(self) -> None:
        if not self._enabled:
            raise NotFound("This server does not sleep.", hint="Start it with --enable-sleep-mode.")


def _level(query: QueryParams) -> int:
    _refuse_parts(query)
    level = query.get("level", "1")
    if level not in map(str, LEVELS):
        raise InvalidRequest(
            f"There is no sleep of level {level[:20]!r}.",
            hint="Use 1 (weights stay in the memory of the host) or 2 (weights are read again).",
            param="level",
        )
    return int(level)


def _refuse_parts(query: QueryParams) -> None:
    """Raises InvalidRequest for what would have no effect, or which of several would be unclear."""
    for name in ("level", "mode"):
        if len(query.getlist(name)) > 1:
            raise InvalidRequest(f"{name} is given more than once.", hint="Give it once.", param=name)
    mode = query.get("mode", WAIT)
    if mode != WAIT:
        raise UnsupportedParameter(
            f"There is no mode {mode[:20]!r}.",
            hint="Requests are never aborted: leave it out, or use wait.",
            param="mode",
        )
    if "tags" in query:
        raise UnsupportedParameter(
            "tags is not supported.", hint="Weights and KV cache sleep together, and wake up together.", param="tags"
        )


async def _refuse_body(request: Request) -> None:
    async for piece in request.stream():
        if piece:
            raise InvalidRequest("This path takes no body.", hint="Give the level in the address: POST /sleep?level=2.")
