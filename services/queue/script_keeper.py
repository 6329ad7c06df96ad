"""Keeps the scripts in Redis, for roles whose users may run them but load none (:mod:`services.queue.acl`)."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.queue.connect import command
from services.queue.scripts import load_scripts

LOOK_S = 0.5
"""How often is looked: so much later than the server the others go on after it was started again."""

log = logging.getLogger(__name__)


class ScriptKeeper:
    """Runs in every scheduler, leader or not: of each release that is there one loads what that release needs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._texts = {script.sha: script.text for script in load_scripts().values()}

    async def look(self) -> int:
        """Loads what a server that was started again, or a replica that took over, does not have; how many scripts.

        Raises QueueUnavailable.
        """
        found = await command(self._redis, "SCRIPT", "EXISTS", *self._texts)
        missing = [text for text, known in zip(self._texts.values(), found, strict=True) if not known]
        for text in missing:
            await command(self._redis, "SCRIPT", "LOAD", text)
        return len(missing)

    async def run(self) -> None:
        """Until cancelled. While Redis is away others say so."""
        while True:
            try:
                if loaded := await self.look():
                    log.debug("loaded %d scripts into Redis", loaded)
            except QueueUnavailable as error:
                log.debug("scripts not looked for: %s", error.message)
            await asyncio.sleep(LOOK_S)
