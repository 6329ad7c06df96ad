"""Bodies of 4 MiB that are wrong in ways which once took seconds and gigabytes to say so."""

from __future__ import annotations

from collections.abc import Callable

SIZE = 4 * 1024 * 1024
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _list(head: bytes, item: bytes, tail: bytes, size: int) -> bytes:
    count = (size - len(head) - len(tail)) // (len(item) + 1)
    return head + b",".join([item] * count) + tail


def _map(head: bytes, value: bytes, tail: bytes, size: int) -> bytes:
    items: list[bytes] = []
    left = size - len(head) - len(tail)
    while left > 0:
        items.append(b'"%d":%b' % (len(items), value))
        left -= len(items[-1]) + 1
    return head + b",".join(items[:-1]) + tail


_CHAT_HEAD = b'{"messages":[{"role":"user","content":'
_SHAPES: dict[str, tuple[str, Callable[[int], bytes], str | None]] = {
    "lists as prompts": (COMPLETIONS, lambda size: _list(b'{"prompt":[', b"[]", b"]}", size), "prompt"),
    "objects as prompts": (COMPLETIONS, lambda size: _list(b'{"prompt":[', b"{}", b"]}", size), "prompt"),
    "lists of one id": (COMPLETIONS, lambda size: _list(b'{"prompt":[', b"[300]", b"]}", size), "prompt"),
    "prompts of two letters": (COMPLETIONS, lambda size: _list(b'{"prompt":[', b'"ab"', b"]}", size), "prompt"),
    "empty parts": (CHAT, lambda size: _list(_CHAT_HEAD + b"[", b"{}", b"]}]}", size), "messages.0.content.0.type"),
    "parts with a field more": (
        CHAT,
        lambda size: _list(_CHAT_HEAD + b"[", b'{"type":"text","text":"","x":null}', b"]}]}", size),
        None,
    ),
    "empty messages": (CHAT, lambda size: _list(b'{"messages":[', b"{}", b"]}", size), "messages.0.role"),
    "messages": (CHAT, lambda size: _list(b'{"messages":[', b'{"role":"user"}', b"]}", size), "messages"),
    "lists as template options": (
        CHAT,
        lambda size: _map(_CHAT_HEAD + b'""}],"chat_template_kwargs":{', b"[]", b"}}", size),
        "chat_template_kwargs",
    ),
    "template options": (
        CHAT,
        lambda size: _map(_CHAT_HEAD + b'""}],"chat_template_kwargs":{', b"1", b"}}", size),
        "chat_template_kwargs",
    ),
    "biases": (COMPLETIONS, lambda size: _map(b'{"prompt":"x","logit_bias":{', b"1", b"}}", size), "logit_bias"),
    "stop strings": (COMPLETIONS, lambda size: _list(b'{"prompt":"x","stop":[', b'"ab"', b"]}", size), "stop"),
    "stop ids": (
        COMPLETIONS,
        lambda size: _list(b'{"prompt":"x","stop_token_ids":[', b"5", b"]}", size),
        "stop_token_ids",
    ),
    "fields": (COMPLETIONS, lambda size: _map(b'{"prompt":"x",', b"[]", b"}", size), None),
    "the same field again and again": (
        COMPLETIONS,
        lambda size: _list(b'{"prompt":"x",', b'"a":null', b"}", size),
        None,
    ),
    "one deep field": (COMPLETIONS, lambda size: b'{"prompt":"x","a":' + b"[" * (size - 19) + b"}", None),
    "one long number": (COMPLETIONS, lambda size: b'{"prompt":"x","seed":1' + b"0" * (size - 23) + b"}", "seed"),
    "one long name": (COMPLETIONS, lambda size: b'{"prompt":"x","' + b"n" * (size - 19) + b'":1}', "n" * 200),
    "one long role": (CHAT, lambda size: b'{"messages":[{"role":"' + b"r" * (size - 26) + b'"}]}', "messages.0.role"),
    "strings as tokens": ("/detokenize", lambda size: _list(b'{"tokens":[', b'""', b"]}", size), "tokens.0"),
}


def hostile_bodies(size: int = SIZE) -> dict[str, tuple[str, bytes, str | None]]:
    """Path, body and the field that its refusal names, by what is wrong."""
    return {name: (path, make(size), param) for name, (path, make, param) in _SHAPES.items()}
