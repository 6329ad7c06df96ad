"""Keeps asking the /ready pages of several processes how they fare."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

POLL_S = 0.5
TIMEOUT_S = 2.0
STUCK_S = 60.0
"""Silence after which a process that has answered counts as stuck, as by the chart's liveness probe."""
_PAGE, _END = "its metrics page", "its exit"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Life:
    """Answers of a process since its last start. Times are by the monotonic clock."""

    missing: str = _PAGE
    answered_at: float | None = None
    ready_at: float | None = None


class Readiness:
    """Follows processes by name.

    Args:
        urls: name of each process -> base URL of its pages.
        on_stuck: called with the name of a process that has answered, and then did not for ``stuck_s``.
    """

    def __init__(
        self, urls: Mapping[str, str], *, on_stuck: Callable[[str], None] = lambda _: None, stuck_s: float = STUCK_S
    ) -> None:
        self.urls = urls
        self._on_stuck, self._stuck_s = on_stuck, stuck_s
        self._lives = {name: _Life() for name in urls}
        self._ending = False
        self.ever = False
        """Whether any of them was ready at any time."""

    def missing(self) -> list[str]:
        """Return which processes are not ready, and what each waits for; for /ready."""
        return [f"{name} ({life.missing})" for name, life in self._lives.items() if life.missing]

    def lacks(self, name: str) -> str:
        """Return what ``name`` waits for; empty: it is ready."""
        return self._lives[name].missing

    def started(self, name: str) -> None:
        """Forget what was known of ``name``: it has been started again."""
        self._lives[name] = _Life(missing=_END if self._ending else _PAGE)

    def served_s(self, name: str) -> float:
        """Return the seconds since ``name`` was first ready after its last start."""
        ready_at = self._lives[name].ready_at
        return 0.0 if ready_at is None else time.monotonic() - ready_at

    def end(self) -> None:
        """Count no process as ready from here on."""
        self._ending = True
        for life in self._lives.values():
            life.missing = _END

    async def follow(self) -> None:
        """Ask until cancelled."""
        began, announced = time.monotonic(), False
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            while True:
                await asyncio.gather(*(self._ask(client, name, url) for name, url in self.urls.items()))
                if not announced and not self.missing():
                    announced = True
                    log.info("all %d workers are ready after %.1f s", len(self.urls), time.monotonic() - began)
                await asyncio.sleep(POLL_S)

    async def _ask(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        life = self._lives[name]
        try:
            answer = await client.get(f"{url}/ready")
        except httpx.HTTPError as error:
            log.debug("%s: %r", name, error)
            self._heard_nothing(name, life)
            return
        waits = " ".join(answer.text.removeprefix("waiting for ").split())[:300]
        life.missing = "" if answer.status_code == 200 else waits or "something"
        life.answered_at = time.monotonic()
        if not life.missing:
            life.ready_at = life.ready_at or life.answered_at
            self.ever = True

    def _heard_nothing(self, name: str, life: _Life) -> None:
        life.missing = _PAGE
        if life.answered_at is not None and time.monotonic() - life.answered_at > self._stuck_s:
            life.answered_at = None
            self._on_stuck(name)
