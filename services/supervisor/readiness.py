"""Whether several processes are ready, asked of their /ready pages again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import httpx

POLL_S = 0.5
PATIENCE_S = 2.0

log = logging.getLogger(__name__)


class Readiness:
    """``urls``: where each process has its pages, by name."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self.urls = urls
        self._missing = dict.fromkeys(urls, "its page")

    def missing(self) -> list[str]:
        """What each that is not ready waits for; for /ready."""
        return [f"{name} ({what})" for name, what in self._missing.items() if what]

    async def follow(self) -> None:
        """Ask until cancelled."""
        began, told = time.monotonic(), False
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            while True:
                await asyncio.gather(*(self._ask(client, name, url) for name, url in self.urls.items()))
                if not told and not self.missing():
                    told = True
                    log.info("all %d workers are ready after %.1f s", len(self.urls), time.monotonic() - began)
                await asyncio.sleep(POLL_S)

    async def _ask(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        try:
            answer = await client.get(f"{url}/ready")
            waits = " ".join(answer.text.removeprefix("waiting for ").split())[:300]
            self._missing[name] = "" if answer.status_code == 200 else waits or "something"
        except httpx.HTTPError as error:
            log.debug("%s: %r", name, error)
            self._missing[name] = "its page"
