"""``expertmesh top``: tokens, latencies, queue, workers and load of a running deployment in a terminal, live."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

from rich.console import Console
from rich.live import Live

from services.config import OptionParser, Settings, parse_options
from services.errors import ConfigError
from services.queue.connect import connect
from services.runtime.local_servers import FindOnRay, add_ray, add_url, none_found, with_local_server, with_server
from services.runtime.tasks import unless_stopped
from services.top.frame import frame
from services.top.readings import Reader, Reading
from services.top.view import view

WINDOW_S = 5.0
"""Time over which rates are means."""
MAX_READINGS = 64


class Top:
    """Draws what ``reader`` reads on ``console``, every ``interval_s``."""

    def __init__(self, reader: Reader, console: Console, interval_s: float) -> None:
        self._reader = reader
        self._console = console
        self._interval_s = interval_s
        self._readings: deque[Reading] = deque(maxlen=MAX_READINGS)

    async def once(self, stop: asyncio.Event, *, as_json: bool = False) -> int:
        """Print one frame of two readings; 1 if Redis was away."""
        await self._look()
        await _wait(stop, self._interval_s)
        now = await self._look()
        seen = frame(self._readings[0], now)
        if as_json:
            print(json.dumps(asdict(seen), indent=2))
        else:
            self._console.print(view(seen, self._console.width))
        return 1 if now.problem else 0

    async def run(self, stop: asyncio.Event) -> int:
        """Draw frames until ``stop``. Returns 0."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while (now := await unless_stopped(self._look(), stop)) is not None:
                size = self._console.size
                live.update(view(frame(self._earlier(now), now), size.width, size.height), refresh=True)
                await _wait(stop, self._interval_s)
        return 0

    async def _look(self) -> Reading:
        self._readings.append(await self._reader.read())
        return self._readings[-1]

    def _earlier(self, now: Reading) -> Reading | None:
        while len(self._readings) > 2 and now.at_s - self._readings[1].at_s >= WINDOW_S:
            self._readings.popleft()
        return self._readings[0] if len(self._readings) > 1 else None


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


@contextmanager
def quits_by_key(stop: asyncio.Event) -> Iterator[None]:
    """Set ``stop`` at the key q, or when the terminal goes away, where the input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def typed() -> None:
        keys = os.read(terminal, 64)
        if not keys or b"q" in keys:
            stop.set()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, typed)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _run(settings: Settings, interval_s: float, *, once: bool, as_json: bool) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    assert settings.redis_url is not None, "checked by main"
    redis, console = connect(settings.redis_url), Console()
    reader = Reader(redis, settings.namespace)
    top = Top(reader, console, interval_s)
    try:
        if once or as_json or not console.is_terminal:
            return await top.once(stop, as_json=as_json)
        with quits_by_key(stop):
            return await top.run(stop)
    finally:
        await reader.close()
        await redis.aclose()


def main(argv: Sequence[str] | None = None, *, on_ray: FindOnRay | None = None) -> int:
    """Return the exit code: 0, or 1 where one frame was asked for and Redis was away. ``on_ray`` finds an application
    on a Ray cluster by its name; None: there is no such option.

    Raises:
        ConfigError: an option is wrong, or nothing says which deployment.
    """
    parser = OptionParser(
        "expertmesh top", "Tokens, latencies, queue, workers and load of a running deployment, live. q quits."
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame and exit (default where the output is no terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print one frame as JSON and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between frames (default: 1.0)"
    )
    add_url(parser)
    if on_ray is not None:
        add_ray(parser)
    given = parse_options(parser, sys.argv[1:] if argv is None else argv, ["redis_url", "redis_url_file", "namespace"])
    if not 0.1 <= given["interval"] <= 3600:
        raise ConfigError("--interval is at least 0.1 and at most 3600 seconds.")
    if on_ray is not None and given["ray"]:
        settings = with_server(given, on_ray(given["ray"]).server)
    else:
        settings, _ = with_local_server(given)
    if settings.redis_url is None:
        raise ConfigError("Which deployment?", hint=f"{none_found()}: give its Redis with --redis-url.")
    return asyncio.run(_run(settings, given["interval"], once=given["once"], as_json=given["json"]))


if __name__ == "__main__":
    sys.exit(main())
