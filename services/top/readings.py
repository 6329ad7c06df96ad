"""Reads for `expertmesh top`: queue, routing table, workers and gateways' latencies from Redis, workers' numbers from
their metrics pages.

A worker that does not answer is left out and named; what Redis said last stays. Nothing is changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.messages import ExpertInfo, GatewayLoad, WorkerInfo
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.loads import LoadReader
from services.queue.scheduler_side import QueueDepth, SchedulerQueue, WorkerState
from services.queue.seats import SeatRegistry, SeatState
from services.queue.tables import TableReader
from services.routing import RoutingTable

TIMEOUT_S = 3.0
"""Time after which Redis, or a worker, that does not answer counts as away."""
_EVERYWHERE = ("0.0.0.0", "::", "[::]")

Page = Mapping[str, float]
"""A metrics page: the sum over all labels by the name of the series, without prefix. Where a series has the label
``state``, there is also the sum by ``name/state``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A reading. ``redis_at_s``: time of the last answer of Redis; 0: there was none. ``problem``: why Redis is away.
    ``gateways`` has the loads that gateways report, by incarnation; ``pages`` those of workers that answered, by id."""

    at_s: float
    redis_at_s: float = 0.0
    problem: str = ""
    depth: QueueDepth | None = None
    table: RoutingTable | None = None
    seats: tuple[SeatState, ...] = ()
    workers: tuple[WorkerState, ...] = ()
    gateways: Mapping[str, GatewayLoad] = field(default_factory=dict)
    pages: Mapping[str, Page] = field(default_factory=dict)
    sleep: int = 0
    """The level at which the model is to sleep; 0: it is to serve."""


class Reader:
    """Reads one namespace. ``clock`` counts seconds."""

    def __init__(self, redis: Redis, namespace: str, clock: Callable[[], float] = time.monotonic) -> None:
        keys, limits = Keys(namespace), QueueLimits()
        self._queue = SchedulerQueue(redis, keys, limits)
        self._seats = SeatRegistry(redis, keys, limits)
        self._tables = TableReader(redis, keys, limits)
        self._loads = LoadReader(redis, keys, limits)
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self._clock = clock
        self._last = Reading(at_s=0.0)

    async def close(self) -> None:
        await self._http.aclose()

    async def read(self) -> Reading:
        """Takes at most :data:`TIMEOUT_S` for Redis and as long for the pages."""
        known = await self._read_redis()
        infos: list[WorkerInfo | ExpertInfo] = [
            *(state.info for state in known.workers),
            *(state.info for state in known.seats),
        ]
        urls = {info.id: _url(info.metrics_url, info.host) for info in infos}
        pages = await asyncio.gather(*(self._page(url) for url in urls.values()))
        found = {worker: page for worker, page in zip(urls, pages, strict=True) if page is not None}
        self._last = replace(known, at_s=self._clock(), pages=found)
        return self._last

    async def _read_redis(self) -> Reading:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return Reading(
                    at_s=0.0,
                    depth=await self._queue.depth(),
                    table=await self._tables.read_table(),
                    seats=tuple(await self._seats.seats()),
                    workers=tuple(await self._queue.workers()),
                    gateways=(await self._loads.loads()).gateways,
                    sleep=await self._queue.sleep_level(),
                    redis_at_s=self._clock(),
                )
        except QueueUnavailable as error:
            return replace(self._last, problem=error.message)
        except TimeoutError:
            return replace(self._last, problem=f"Redis does not answer within {TIMEOUT_S:g} s.")

    async def _page(self, url: str | None) -> Page | None:
        if url is None:
            return None
        try:
            answer = await self._http.get(url)
            answer.raise_for_status()
            return sums(answer.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None


def sums(text: str) -> Page:
    """Return the page in ``text``. Raises ValueError where it is no metrics page."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("expertmesh_")
            keys = [name, f"{name}/{sample.labels['state']}"] if "state" in sample.labels else [name]
            for key in keys:
                totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def _url(url: str | None, host: str) -> str | None:
    """Return the URL of a worker's page: a worker that listens on all addresses is reached by its host's name."""
    parts = urlsplit(url or "")
    if parts.hostname not in _EVERYWHERE:
        return url
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def rate(series: str, worker: str, before: Reading | None, now: Reading) -> float | None:
    """Return the growth per second of a worker's counter between two readings; None where one of them lacks it."""
    then = before.pages.get(worker) if before else None
    page = now.pages.get(worker)
    if before is None or then is None or page is None or series not in page or now.at_s <= before.at_s:
        return None
    return max(0.0, page[series] - then.get(series, 0.0)) / (now.at_s - before.at_s)
