"""C1, M7 and kin: bodies that are cheap to send and dear to read. A gateway that parses for seconds keeps everybody
waiting, and one that keeps an object for each fault of a body needs a thousand times its size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from testkit.processes.hostile_bodies import Filled, filled, numbered

from abuse.attack import Attack, Bounds, Target

SIZES_MB = (0.26, 1.0, 4.1)
_CHAT = b'{"messages":['
_MESSAGE = _CHAT + b'{"role":"user","content":'
WRONG: dict[str, tuple[str, Filled]] = {
    "empty lists": ("/v1/completions", filled(b'{"prompt":[', b"[]", b"]}")),
    "empty parts": ("/v1/chat/completions", filled(_MESSAGE + b"[", b"{}", b"]}]}")),
    "template options": ("/v1/chat/completions", numbered(_MESSAGE + b'"hi"}],"chat_template_kwargs":{', b"[]", b"}}")),
    "empty strings as ids": ("/detokenize", filled(b'{"tokens":[', b'""', b"]}")),
    "ids, too many": ("/v1/completions", filled(b'{"max_tokens":1,"prompt":[', b"7", b"]}")),
    "fractions as ids": ("/v1/completions", filled(b'{"prompt":[', b"0.5", b"]}")),
    "lists, the last one wrong": ("/v1/completions", filled(b'{"prompt":[', b"[7]", b',["x"]]}')),
    "messages, too many": ("/v1/chat/completions", filled(_CHAT, b'{"role":"x"}', b"]}")),
    "stop strings": ("/v1/completions", filled(b'{"prompt":"a","stop":[', b'""', b"]}")),
    "biases": ("/v1/completions", filled(b'{"prompt":"a","logit_bias":{', b'"x":"y"', b"}}")),
    "depth": ("/v1/completions", lambda size: b'{"prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"),
    "keys twice": ("/v1/completions", filled(b"{", b'"prompt":[[]]', b"}")),
    "unknown fields": ("/v1/completions", filled(b'{"prompt":"a","tools":[', b'{"type":"function"}', b"]}")),
    "escapes": ("/v1/completions", filled(b'{"max_tokens":1,"prompt":["', b"\\\\u0000", b'"]}')),
    "a salt": (
        "/v1/completions",
        lambda size: b'{"n":128,"max_tokens":1,"prompt":"a","cache_salt":"' + b"s" * size + b'"}',
    ),
    "a long number": ("/v1/completions", lambda size: b'{"max_tokens":' + b"9" * size + b',"prompt":"a"}'),
}


def _body(name: str) -> Attack:
    path, of_size = WRONG[name]

    async def run(target: Target) -> None:
        for size in SIZES_MB:
            await target.post(path, of_size(int(size * 1e6)), timeout_s=90)
            target.found[f"{size:g} MB"] = f"{target.answers.slowest:.1f} s, {target.stage.rss_mib():.0f} MiB"

    return Attack(name=f"body: {name}", finding="C1", run=run, bounds=Bounds(peak=450, within=150))


async def _at_once(target: Target) -> None:
    """Eight kinds side by side, twice."""
    bodies = [(path, of_size(4_000_000)) for path, of_size in list(WRONG.values())[:8]]
    await asyncio.gather(*(target.post(path, body) for path, body in bodies * 2))


async def _many_at_once(target: Target) -> None:
    """200 of 4 MB, each whole and in order but too long: what waits to be read has a bound, too."""
    body = filled(b'{"max_tokens":1,"prompt":[', b"7", b"]}")(4_190_000)
    await asyncio.gather(*(target.post("/v1/completions", body, timeout_s=80) for _ in range(200)))


async def _too_large(target: Target) -> None:
    """Bodies over the limit, announced or not; what is thrown away must cost nobody."""
    piece = b"%x\r\n" % 65_536 + b" " * 65_536 + b"\r\n"
    chunked = target.dialer().head("POST", "/v1/completions", {"Transfer-Encoding": "chunked"})
    announced = target.dialer().head("POST", "/v1/completions", {"Content-Length": str(1 << 30)})

    async def send(head: bytes, what: bytes) -> None:
        target.answers.note(await target.dialer().send(head, (what for _ in range(800)), timeout_s=30))

    await asyncio.gather(
        *(send(chunked, piece) for _ in range(12)), *(send(announced, b" " * 65_536) for _ in range(12))
    )


async def _tiny_chunks(target: Target) -> None:
    """4 MB, a byte in each chunk."""
    head = target.dialer().head("POST", "/v1/completions", {"Transfer-Encoding": "chunked"})
    piece = b"1\r\n \r\n" * 10_000
    end = b"2\r\n{}\r\n0\r\n\r\n"
    for _ in range(2):
        target.answers.note(await target.dialer().send(head, [*[piece] * 400, end], timeout_s=60))


def _texts(path: str, fields: str, text: str, size: int = 4_000_000) -> Callable[[Target], Awaitable[None]]:
    async def run(target: Target) -> None:
        encoded = json.dumps(text)[1:-1]
        body = b'{%s "%s"}' % (fields.encode(), (encoded * (size // len(encoded.encode()))).encode())
        await asyncio.gather(*(target.post(path, body) for _ in range(4)))

    return run


async def _detokenize(target: Target) -> None:
    body = filled(b'{"tokens":[', b"7", b"]}")(4_190_000)
    await asyncio.gather(*(target.post("/detokenize", body) for _ in range(4)))


async def _unread_tokens(target: Target) -> None:
    """Long texts, and nobody waits for what becomes of them."""
    asked = target.dialer().request("/tokenize", {"prompt": "wörd " * 600_000, "return_token_strs": True})
    for _ in range(24):
        async with target.dialer().socket() as sock:
            await asyncio.get_running_loop().sock_sendall(sock, asked)
    await asyncio.sleep(8)


async def _many_messages(target: Target) -> None:
    """As many as there may be, and more."""
    for count in (4096, 4096, 60_000):
        turns = [{"role": ("user", "assistant")[i % 2], "content": "x" * 40} for i in range(count)]
        await target.post("/v1/chat/completions", {"messages": turns, "max_tokens": 4})
        await target.post("/tokenize", {"messages": turns})


_TEXT = Bounds(peak=600, within=120)
ATTACKS = [
    *map(_body, WRONG),
    Attack(name="bodies: 16 at once", finding="C1", run=_at_once, bounds=Bounds(peak=700, within=150)),
    Attack(name="bodies: 200 at once", finding="own", run=_many_at_once, bounds=Bounds(peak=700, within=100)),
    Attack(name="bodies: 24 over the limit", finding="own", run=_too_large, bounds=Bounds(also=("reset", "cut off"))),
    Attack(name="body: a byte in each chunk", finding="own", run=_tiny_chunks, bounds=Bounds(within=120)),
    Attack(name="tokenize: 4 MB, 4 at once", finding="M7", run=_texts("/tokenize", '"prompt":', "word "), bounds=_TEXT),
    Attack(name="tokenize: a word of 4 MB", finding="M7", run=_texts("/tokenize", '"prompt":', "a"), bounds=_TEXT),
    Attack(name="tokenize: ligatures", finding="M7", run=_texts("/tokenize", '"prompt":', "\ufdfa"), bounds=_TEXT),
    Attack(
        name="tokenize: with strings",
        finding="M7",
        run=_texts("/tokenize", '"return_token_strs":true,"prompt":', "é\u0301"),
        bounds=_TEXT,
    ),
    Attack(name="tokenize: and leave", finding="own", run=_unread_tokens, bounds=_TEXT),
    Attack(
        name="completions: 4 MB of text",
        finding="M7",
        run=_texts("/v1/completions", '"max_tokens":1,"prompt":', "\u00e9"),
        bounds=_TEXT,
    ),
    Attack(name="detokenize: 2M ids, 4 at once", finding="M7", run=_detokenize, bounds=_TEXT),
    Attack(name="chat: 4,096 messages", finding="own", run=_many_messages),
]
