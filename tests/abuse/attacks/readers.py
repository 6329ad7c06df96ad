"""M2: clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import Any

from abuse.attack import Attack, Bounds, Target
from abuse.kit.stage import Shape
from abuse.kit.tokens import BURST
from services.config.settings import Settings

FREED_S = 75.0
_RECEIVED = 4096


def stall_option() -> str | None:
    """The setting that bounds how long a reader may stall, where there is one."""
    names = [name for name in Settings.model_fields if name.endswith("_timeout")]
    return next((name for name in names if "send" in name or "stall" in name or "write" in name), None)


def _shape() -> Shape:
    option = stall_option()
    return Shape(gateway=((option, 5),) if option else ())


def _files(target: Target) -> int:
    return len(os.listdir(f"/proc/{target.stage.procs['gateway'].pid}/fd"))


async def unread(target: Target, stack: contextlib.AsyncExitStack, count: int, body: dict[str, Any]) -> None:
    """So many streams whose clients stopped reading before they began."""
    data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
    head = target.door().head("POST", "/v1/completions", {"Content-Length": str(len(data))})
    loop = asyncio.get_running_loop()
    for _ in range(count):
        sock = await stack.enter_async_context(target.door().socket(_RECEIVED))
        await loop.sock_sendall(sock, head + data)


async def stopped(target: Target) -> None:
    """Five with 10 MB each to come: their connections and what waits for them are freed."""
    freed_s = 10.0 if stall_option() else FREED_S
    before, body = _files(target), {"prompt": [BURST, 9], "n": 8, "logprobs": 20, "max_tokens": 800}
    async with contextlib.AsyncExitStack() as stack:
        await unread(target, stack, 5, body)
        await asyncio.sleep(6)  # now all is there that will come
        held, began = _files(target) - before, time.monotonic()
        while _files(target) - before > held - 5 and time.monotonic() < began + freed_s + 10:
            await asyncio.sleep(0.5)
        target.found["freed after"] = f"{time.monotonic() - began:.0f} s"
        target.check(_files(target) - before <= held - 5, f"not freed within {freed_s + 10:g} s")


async def slow(target: Target) -> None:
    """50 that read a byte a second."""
    async with contextlib.AsyncExitStack() as stack:
        await unread(target, stack, 50, {"prompt": [9] * 20, "n": 4, "logprobs": 5, "max_tokens": 100})
        await asyncio.sleep(12)


async def never_read_whole(target: Target) -> None:
    """40 answers of 2 MB, whole, that nobody fetches."""
    data = json.dumps({"prompt": [BURST, 9], "n": 16, "logprobs": 20, "max_tokens": 96, "ignore_eos": True}).encode()
    head = target.door().head("POST", "/v1/completions", {"Content-Length": str(len(data))})
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(40):
            sock = await stack.enter_async_context(target.door().socket(_RECEIVED))
            await asyncio.get_running_loop().sock_sendall(sock, head + data)
        await asyncio.sleep(8)
        target.found["MiB then"] = round(target.stage.rss_mib("gateway"))


ATTACKS = [
    Attack(name="readers: 5 that stop", finding="M2", run=stopped, bounds=Bounds(peak=600, within=120), shape=_shape()),
    Attack(name="readers: 50 a byte a second", finding="own", run=slow, bounds=Bounds(peak=500)),
    Attack(name="readers: 40 whole answers", finding="own", run=never_read_whole, bounds=Bounds(peak=700)),
]
