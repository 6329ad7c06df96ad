"""Keeps the scripts in Redis, for roles whose users may run them but load none (:mod:`services.queue.acl`)."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.queue.connect import command
from services.queue.scripts import load_scripts

LOOK_S = 0.5
"""The period of looks; after a restart of the server other processes wait about as long for their scripts."""

log = logging.getLogger(__name__)


class ScriptKeeper:
    """Runs in every scheduler, leading or not, so that the scripts of each release that is there are loaded."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._texts = {script.sha: script.text for script in load_scripts().values()}

    async def look(self) -> int:
        """Loads the scripts that a restarted server, or a replica that took over, does not have. Returns how many it
        loaded. Raises QueueUnavailable."""
        found = await command(self._redis, "SCRIPT", "EXISTS", *self._texts)
        missing = [text for text, known in zip(self._texts.values(), found, strict=True) if not known]
        for text in missing:
            await command(self._redis, "SCRIPT", "LOAD", text)
        return len(missing)

    async def run(self) -> None:
        """Looks until cancelled. Other tasks log that Redis is away."""
        while True:
            try:
                if loaded := await self.look():
                    log.debug("loaded %d scripts into Redis", loaded)
            except QueueUnavailable as error:
                log.debug("cannot check the scripts in Redis: %s", error.message)
            await asyncio.sleep(LOOK_S)
