"""Connections that a test steers: each script call waits for its turn, and its reply or itself may be lost.

An operation of several calls can so be left between two of them while others run. Scripts read their time from a key
that the test sets, and no key expires by itself: Redis would use its own clock.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from services.errors import QueueUnavailable
from services.queue.scripts import Script, load_scripts

Fate = Literal["go", "lost before", "reply lost"]
Observer = Callable[[str, list[str], Any], Coroutine[Any, Any, None]]
CLOCK = "clock"
"""The key with the time in ms."""
_STEPPED = f"""
local real = redis
local redis = setmetatable({{ call = function(name, ...)
  local words = {{ ... }}
  if name == 'PEXPIRE' then return 1 end
  if name == 'SET' and words[3] == 'PX' then return real.call('SET', words[1], words[2]) end
  if name ~= 'TIME' then return real.call(name, ...) end
  local ms = tonumber(real.call('GET', '{CLOCK}'))
  return {{ math.floor(ms / 1000), ms % 1000 * 1000 }}
end }}, {{ __index = real }})
"""


def stepped_scripts() -> dict[str, Script]:
    """Return all scripts, with ``TIME`` from the key and without times to live."""
    texts = {name: _STEPPED + script.text for name, script in load_scripts().items()}
    return {name: Script(text, hashlib.sha1(text.encode()).hexdigest()) for name, text in texts.items()}


class SteeredRedis:
    """Stands in for a :class:`redis.asyncio.Redis` of one actor, which has one call under way at a time."""

    def __init__(self, redis: Redis, names: dict[str, str], observe: Observer) -> None:
        """``names`` of scripts by their hash; ``observe`` gets every call that Redis ran: name, arguments, reply."""
        self._redis, self._names, self._observe = redis, names, observe
        self.waiting = asyncio.Event()
        self._fate: asyncio.Future[Fate] | None = None

    def go(self, fate: Fate) -> None:
        """Let the call that waits take place, or not."""
        assert self._fate is not None
        self.waiting.clear()
        self._fate.set_result(fate)

    async def execute_command(self, *arguments: Any) -> Any:
        if arguments[0] != "EVALSHA":
            return await self._redis.execute_command(*arguments)  # type: ignore[no-untyped-call]
        self._fate = asyncio.get_running_loop().create_future()
        self.waiting.set()
        if (fate := await self._fate) == "lost before":
            raise RedisConnectionError("lost before it was sent")
        name, texts = self._names[arguments[1]], [_text(value) for value in arguments[5:]]
        try:
            reply = await self._redis.execute_command(*arguments)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            await self._observe(name, texts, str(error))
            raise
        await self._observe(name, texts, reply)
        if fate == "reply lost":
            raise RedisConnectionError("lost with its reply")
        return reply


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Persistent:
    """A side of the queue whose methods are repeated until they come through, as its contract allows."""

    def __init__(self, queue: Any, scripts: dict[str, Script]) -> None:
        self._queue = queue
        queue._scripts._scripts = scripts

    def __getattr__(self, name: str) -> Any:
        async def repeated(*arguments: Any, **options: Any) -> Any:
            while True:
                try:
                    return await getattr(self._queue, name)(*arguments, **options)
                except QueueUnavailable:
                    continue

        return repeated


class Operation:
    """What an actor does, up to its next call."""

    def __init__(self, redis: SteeredRedis, work: Coroutine[Any, Any, None]) -> None:
        self._redis = redis
        self.task = asyncio.create_task(work)

    async def reach_call(self) -> bool:
        """Whether it waits for the turn of a call; False when it is over. Raises what it raised."""
        waiting = asyncio.create_task(self._redis.waiting.wait())
        await asyncio.wait([self.task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waiting.cancel()
            self.task.result()
            return False
        return True

    def go(self, fate: Fate) -> None:
        self._redis.go(fate)

    async def drop(self) -> None:
        """Its process dies."""
        self.task.cancel()
        await asyncio.wait([self.task])
