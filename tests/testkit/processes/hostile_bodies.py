"""Bodies of 4 MiB that are wrong in ways which once took seconds and gigabytes to say so."""

from __future__ import annotations

from collections.abc import Callable

SIZE = 4 * 1024 * 1024
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Filled = Callable[[int], bytes]
"""Bodies of a size."""


def filled(head: bytes, item: bytes, tail: bytes) -> Filled:
    """``item`` as often as it takes, commas in between."""

    def of_size(size: int) -> bytes:
        count = (size - len(head) - len(tail)) // (len(item) + 1)
        return head + b",".join([item] * count) + tail

    return of_size


def numbered(head: bytes, value: bytes, tail: bytes) -> Filled:
    """``value`` under as many names as it takes."""

    def of_size(size: int) -> bytes:
        items: list[bytes] = []
        left = size - len(head) - len(tail)
        while left > 0:
            items.append(b'"%d":%b' % (len(items), value))
            left -= len(items[-1]) + 1
        return head + b",".join(items[:-1]) + tail

    return of_size


_MESSAGE = b'{"messages":[{"role":"user","content":'
_CALLS = b'{"messages":[{"role":"assistant","tool_calls":['
_OPTIONS = _MESSAGE + b'""}],"chat_template_kwargs":{'
_SHAPES: dict[str, tuple[str, Filled, str | None]] = {
    "lists as prompts": (COMPLETIONS, filled(b'{"prompt":[', b"[]", b"]}"), "prompt"),
    "objects as prompts": (COMPLETIONS, filled(b'{"prompt":[', b"{}", b"]}"), "prompt"),
    "lists of one id": (COMPLETIONS, filled(b'{"prompt":[', b"[300]", b"]}"), "prompt"),
    "prompts of two letters": (COMPLETIONS, filled(b'{"prompt":[', b'"ab"', b"]}"), "prompt"),
    "empty parts": (CHAT, filled(_MESSAGE + b"[", b"{}", b"]}]}"), "messages.0.content.0.type"),
    "parts with a field more": (CHAT, filled(_MESSAGE + b"[", b'{"type":"text","text":"","x":null}', b"]}]}"), None),
    "empty messages": (CHAT, filled(b'{"messages":[', b"{}", b"]}"), "messages.0.role"),
    "tool calls": (CHAT, filled(_CALLS, b'{"function":{"name":"f"}}', b"]}]}"), "messages.0.tool_calls"),
    "fields of a tool call": (CHAT, numbered(_CALLS + b'{"function":{"name":"f"},', b"1", b"}]}]}"), None),
    "messages": (CHAT, filled(b'{"messages":[', b'{"role":"user"}', b"]}"), "messages"),
    "lists as template options": (CHAT, numbered(_OPTIONS, b"[]", b"}}"), "chat_template_kwargs"),
    "template options": (CHAT, numbered(_OPTIONS, b"1", b"}}"), "chat_template_kwargs"),
    "biases": (COMPLETIONS, numbered(b'{"prompt":"x","logit_bias":{', b"1", b"}}"), "logit_bias"),
    "stop strings": (COMPLETIONS, filled(b'{"prompt":"x","stop":[', b'"ab"', b"]}"), "stop"),
    "stop ids": (COMPLETIONS, filled(b'{"prompt":"x","stop_token_ids":[', b"5", b"]}"), "stop_token_ids"),
    "fields": (COMPLETIONS, numbered(b'{"prompt":"x",', b"[]", b"}"), None),
    "the same field again and again": (COMPLETIONS, filled(b'{"prompt":"x",', b'"a":null', b"}"), None),
    "one deep field": (COMPLETIONS, lambda size: b'{"prompt":"x","a":' + b"[" * (size - 19) + b"}", None),
    "one long number": (COMPLETIONS, lambda size: b'{"prompt":"x","seed":1' + b"0" * (size - 23) + b"}", "seed"),
    "one long name": (COMPLETIONS, lambda size: b'{"prompt":"x","' + b"n" * (size - 19) + b'":1}', "n" * 200),
    "one long role": (CHAT, lambda size: b'{"messages":[{"role":"' + b"r" * (size - 26) + b'"}]}', "messages.0.role"),
    "strings as tokens": ("/detokenize", filled(b'{"tokens":[', b'""', b"]}"), "tokens.0"),
}


def hostile_bodies(size: int = SIZE) -> dict[str, tuple[str, bytes, str | None]]:
    """Path, body and the field that its refusal names, by what is wrong."""
    return {name: (path, make(size), param) for name, (path, make, param) in _SHAPES.items()}
