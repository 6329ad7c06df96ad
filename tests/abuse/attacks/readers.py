"""M2: clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from functools import partial
from typing import Any

from abuse.attack import Attack, Bounds, Target
from abuse.attacks.heads import Connections
from abuse.kit.cage import descriptors
from abuse.kit.stage import Shape
from abuse.kit.tokens import BURST
from services.config.settings import Settings

FREED_S = 75.0
_RECEIVED = 4096
_STREAM = {"stream": True, "ignore_eos": True}


def stall_option() -> str | None:
    """The setting that bounds how long a reader may stall, where there is one."""
    names = [name for name in Settings.model_fields if name.endswith("_timeout")]
    return next((name for name in names if "send" in name or "stall" in name or "write" in name), None)


def _shape() -> Shape:
    option = stall_option()
    return Shape(gateway=((option, 5),) if option else ())


async def unread(
    target: Target, stack: contextlib.AsyncExitStack, count: int, body: dict[str, Any], path: str = "/v1/completions"
) -> list[socket.socket]:
    """So many requests whose clients stopped reading before an answer began."""
    loop, opened, asked = asyncio.get_running_loop(), list[socket.socket](), target.dialer().request(path, body)
    for _ in range(count):
        opened.append(await stack.enter_async_context(target.dialer().socket(_RECEIVED)))
        await loop.sock_sendall(opened[-1], asked)
    return opened


async def _sip(sockets: list[socket.socket], size: int, seconds: float) -> None:
    """Reads ``size`` bytes a second of each."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.recv(size)
        await asyncio.sleep(1)


async def stopped(target: Target) -> None:
    """Five with 10 MB each to come: their connections and what waits for them are freed."""
    freed_s, files = 10.0 if stall_option() else FREED_S, partial(descriptors, target.stage.procs["gateway"].pid)
    before, body = files(), {"prompt": [BURST, 9], "n": 8, "logprobs": 20, "max_tokens": 800} | _STREAM
    async with contextlib.AsyncExitStack() as stack:
        await unread(target, stack, 5, body)
        await asyncio.sleep(6)  # now all is there that will come
        held, began = files() - before, time.monotonic()
        while files() - before > held - 5 and time.monotonic() < began + freed_s + 10:
            await asyncio.sleep(0.5)
        target.found["freed after"] = f"{time.monotonic() - began:.0f} s"
        target.check(files() - before <= held - 5, f"not freed within {freed_s + 10:g} s")


async def slow(target: Target) -> None:
    """50 that read a byte a second."""
    async with contextlib.AsyncExitStack() as stack:
        body = {"prompt": [9] * 20, "n": 4, "logprobs": 5, "max_tokens": 100} | _STREAM
        await _sip(await unread(target, stack, 50, body), 1, 12)


async def never_read_whole(target: Target) -> None:
    """40 answers of 2 MB, whole, that nobody fetches."""
    body = {"prompt": [BURST, 9], "n": 16, "logprobs": 20, "max_tokens": 96, "ignore_eos": True}
    async with contextlib.AsyncExitStack() as stack:
        await unread(target, stack, 40, body)
        await asyncio.sleep(8)
        target.found["MiB then"] = round(target.stage.rss_mib())


async def hoarded(target: Target) -> None:
    """40 answers of 20 MB, finished, of which somebody takes some kilobytes a second: no other tenant's answer may be
    given up for them."""
    body = {"prompt": [BURST, 9], "n": 32, "logprobs": 20, "max_tokens": 640, "ignore_eos": True}
    async with contextlib.AsyncExitStack() as stack:
        sockets = []
        for _ in range(10):
            sockets += await unread(target, stack, 4, body)
            await _sip(sockets, 4096, 2)
        target.found["MiB then"] = round(target.stage.rss_mib())
        await _sip(sockets, 4096, 5)
        answer = await target.post("/v1/completions", {"prompt": [9] * 20, "max_tokens": 3}, tenant="bob")
        target.check(answer.status == 200, f"meanwhile another tenant gets {answer.kind}")


async def unread_tokens(target: Target) -> None:
    """200 answers of /tokenize and as many of /detokenize, megabytes each, that nobody reads."""
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000))) * 6
    ids = target.tokens_of("the quick brown fox ") * 6_000
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            await unread(target, stack, 10, {"prompt": text, "return_token_strs": True}, "/tokenize")
            await unread(target, stack, 10, {"tokens": ids}, "/detokenize")
            await asyncio.sleep(0.2)
        await asyncio.sleep(5)
        target.found["MiB then"] = round(target.stage.rss_mib())


async def crowded(target: Target) -> None:
    """1,500 clients ask for the answer of one key, with 1,024 choices, and read nothing of it."""
    body = {"prompt": [[BURST, 9, i] for i in range(8)], "n": 128, "max_tokens": 64, "ignore_eos": True, "seed": 1}
    headers = {"Idempotency-Key": f"crowded-{id(target)}"}
    asked = target.dialer().request("/v1/completions", body | {"stream": True}, headers)
    async with Connections(target) as connections:
        for _ in range(15):
            await connections.add(100, [asked])
            await asyncio.sleep(0.3)
        await asyncio.sleep(4)
        target.found["MiB then"] = round(target.stage.rss_mib())


ATTACKS = [
    Attack(name="readers: 5 that stop", finding="M2", run=stopped, bounds=Bounds(peak=600, within=120), shape=_shape()),
    Attack(name="readers: 50 a byte a second", finding="own", run=slow, bounds=Bounds(peak=500)),
    Attack(name="readers: 40 whole answers", finding="own", run=never_read_whole, bounds=Bounds(peak=700)),
    Attack(name="readers: 40 that hoard", finding="own", run=hoarded, bounds=Bounds(peak=700, within=120)),
    Attack(name="readers: 400 lists of tokens", finding="own", run=unread_tokens, bounds=Bounds(peak=700, within=90)),
    Attack(name="readers: 1,500 for one key", finding="own", run=crowded, bounds=Bounds(peak=700, within=90)),
]
