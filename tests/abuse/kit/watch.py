"""Who watches the gateway and Redis, in a process of its own: probes each 100 ms, as Kubernetes sends them but more
often, memory, descriptors. A probe is sent whether or not the one before it was answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abuse.kit.cage import MIB, descriptors, rss_mib
from abuse.kit.child import OwnLag, obey

PROBE_S, MEMORY_S, REDIS_S = 0.1, 0.05, 0.25
_MAX_PROBES = 200
Series = list[tuple[float, float]]


@dataclass(kw_only=True)
class Watch:
    """``gateway`` and ``redis`` are pids."""

    host: str
    port: int
    gateway: int
    redis: int
    redis_port: int
    lag: OwnLag = field(default_factory=OwnLag)
    health: Series = field(default_factory=list)
    failed: list[tuple[float, str]] = field(default_factory=list)
    ping: Series = field(default_factory=list)
    used: Series = field(default_factory=list)
    rss: dict[str, Series] = field(default_factory=lambda: {"gateway": [], "redis": []})
    files: Series = field(default_factory=list)
    probing: dict[asyncio.Task[None], float] = field(default_factory=dict)
    pinging: float | None = None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for each in (self.lag.run, self._probe, self._memory, self._files, self._redis):
                group.create_task(each())

    async def _probe(self) -> None:
        while True:
            if len(self.probing) < _MAX_PROBES:
                task = asyncio.create_task(self._one_probe())
                self.probing[task] = time.monotonic()
                task.add_done_callback(lambda task: self.probing.pop(task, None))
            await asyncio.sleep(PROBE_S)

    async def _one_probe(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(90):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    line = await reader.readline()
                finally:
                    writer.transport.abort()
            if b" 200 " not in line:
                raise ConnectionError(f"answered {line!r}")
        except (OSError, TimeoutError) as error:
            self.failed.append((began, f"{type(error).__name__}: {error}"))
        else:
            now = time.monotonic()
            self.health.append((began, now - began - self.lag.within(began, now)))

    async def _memory(self) -> None:
        while True:
            for name, pid in (("gateway", self.gateway), ("redis", self.redis)):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    self.rss[name].append((time.monotonic(), rss_mib(pid)))
            await asyncio.sleep(MEMORY_S)

    async def _files(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.files.append((time.monotonic(), descriptors(self.gateway)))
            await asyncio.sleep(0.5)

    async def _redis(self) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.redis_port)
                try:
                    while True:
                        await self._ask_redis(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(REDIS_S)

    async def _ask_redis(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """PING, timed, twice a look at the memory."""
        for _ in range(2):
            began = self.pinging = time.monotonic()
            writer.write(b"PING\r\n")
            if not await reader.readline():
                raise EOFError
            now, self.pinging = time.monotonic(), None
            self.ping.append((began, now - began - self.lag.within(began, now)))
            await asyncio.sleep(REDIS_S / 2)
        writer.write(b"INFO memory\r\n")
        size = int((await reader.readline())[1:])
        info = await reader.readexactly(size + 2)
        used = next(line for line in info.split(b"\r\n") if line.startswith(b"used_memory:"))
        self.used.append((time.monotonic(), int(used.split(b":")[1]) / MIB))

    async def mark(self) -> float:
        """From here on the high-water mark of the gateway's memory is counted again."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.gateway}/clear_refs").write_text("5")
        return time.monotonic()

    async def follow(self, gateway: int, port: int) -> None:
        """Another gateway process from here on."""
        self.gateway, self.port = gateway, port

    async def report(self, since: float, until: float) -> dict[str, Any]:
        """What was seen between two times of ``time.monotonic``; probes without an answer count as they stand."""
        now = time.monotonic()
        waiting = [(began, now - began) for began in self.probing.values()]
        gateway, used = _within(self.rss["gateway"], since, until), _within(self.used, since, until)
        health = _within(self.health + waiting, since, until)
        ping = _within(self.ping, since, until) + ([now - self.pinging] if self.pinging else [])
        return {
            "health": max(health, default=None),
            "probes": len(health),
            "failed": [what for at, what in self.failed if since <= at <= until],
            "ping": max(ping, default=None),
            "rss_before": gateway[0] if gateway else None,
            "rss_after": gateway[-1] if gateway else None,
            "rss_peak": max([*gateway, _high_water(self.gateway)], default=None),
            "redis_peak": max(_within(self.rss["redis"], since, until), default=None),
            "used_before": used[0] if used else None,
            "used_after": used[-1] if used else None,
            "used_peak": max(used, default=None),
            "files": max(_within(self.files, since, until), default=None),
            "own_lag": self.lag.within(since, until),
        }


def _within(series: Series, since: float, until: float) -> list[float]:
    return [value for at, value in series if since <= at <= until]


def _high_water(pid: int) -> float:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024
    return 0.0


async def main(config: dict[str, Any]) -> None:
    watch = Watch(**config)
    running = asyncio.create_task(watch.run())
    await obey({"mark": watch.mark, "report": watch.report, "follow": watch.follow})
    running.cancel()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
