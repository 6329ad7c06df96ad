"""Answers that are known, and whether those of a server are the same.

A file has a line of JSON for each: {"prompt": text or ids} or {"messages": [...]}, and the answer: {"text"} and
{"token_ids"} (or "output_ids"), or one of both. ``max_tokens`` says how long the answer was allowed to be; without it
an answer is compared as far as it goes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loadgen.client import StreamResult
from loadgen.errors import FileUnusable
from loadgen.results import WrongAnswer

_SHOWN = 200
"""Characters of an answer in an example."""


class _Line(msgspec.Struct, omit_defaults=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    output_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """``max_tokens``: how long it was allowed to be, None if that is not known."""

    text: str | None
    token_ids: Sequence[int] | None
    max_tokens: int | None


@dataclass(kw_only=True, slots=True)
class Answers:
    """Known answers by prompt. ``source`` is where they come from."""

    source: str
    known: dict[bytes, Known] = field(default_factory=dict)

    def check(self, number: int, body: Mapping[str, object], result: StreamResult) -> tuple[bool, WrongAnswer | None]:
        """Returns whether the answer to request ``number`` is known, and what is wrong with ``result``."""
        known = self.known.get(key_of(body))
        if known is None:
            return False, None
        return True, compare(number, known, result, body.get("max_tokens"))

    def learn(self, body: Mapping[str, object], result: StreamResult) -> None:
        limit = body.get("max_tokens")
        ids = list(result.token_ids) or None
        self.known[key_of(body)] = Known(result.text, ids, limit if isinstance(limit, int) else None)


def key_of(body: Mapping[str, object]) -> bytes:
    """Returns what names the prompt of ``body``."""
    asked = body.get("messages") or body.get("prompt")
    return hashlib.blake2b(msgspec.json.encode(asked, order="deterministic"), digest_size=16).digest()


def compare(number: int, known: Known, result: StreamResult, limit: object) -> WrongAnswer | None:
    """Returns how ``result``, which was allowed ``limit`` tokens, differs from what is ``known``; None: not at all."""
    same_limit = known.max_tokens is not None and known.max_tokens == limit
    if known.token_ids is not None and result.token_ids:
        return _differ(number, known.token_ids, result.token_ids, whole=same_limit)
    if known.text is not None:
        return _differ(number, known.text, result.text, whole=same_limit)
    return None


def _differ(number: int, wanted: Sequence[Any], found: Sequence[Any], *, whole: bool) -> WrongAnswer | None:
    """``whole``: both have to end at the same place; else one may be the other's begin, but not empty."""
    shared = min(len(wanted), len(found))
    place = next((at for at in range(shared) if wanted[at] != found[at]), shared)
    if place == shared and (len(wanted) == len(found) or (not whole and found)):
        return None
    return WrongAnswer(number=number, expected=_shown(wanted, place), found=_shown(found, place), differs_at=place)


def _shown(answer: Sequence[Any], place: int) -> str:
    """The part of an answer around the place at which it differs."""
    part = answer[max(0, place - 20) :]
    return (part if isinstance(part, str) else " ".join(map(str, part)))[:_SHOWN]


def read_answers(path: Path) -> Answers:
    """Returns the answers of a file.

    Raises:
        FileUnusable: there is no such file, or it has no answers.
    """
    decoder = msgspec.json.Decoder(_Line)
    answers = Answers(source=path.name)
    try:
        for line in path.expanduser().read_bytes().splitlines():
            if line.strip():
                each = decoder.decode(line)
                asked: dict[str, object] = {"prompt": each.prompt, "messages": each.messages}
                ids = each.token_ids or each.output_ids
                if each.text is not None or ids:
                    answers.known[key_of(asked)] = Known(each.text, ids, each.max_tokens)
    except OSError as error:
        raise FileUnusable(f"Cannot read the answers {path}: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise FileUnusable(f"{path} has no answers: {error}.") from error
    if not answers.known:
        raise FileUnusable(f"{path} has no answers.", hint='Lines are {"prompt", "text", "token_ids", "max_tokens"}.')
    return answers


def line_of(body: Mapping[str, Any], result: StreamResult) -> bytes:
    """Returns the line of an answer, as :func:`read_answers` reads it."""
    line = _Line(
        prompt=body.get("prompt"),
        messages=body.get("messages"),
        max_tokens=body.get("max_tokens"),
        text=result.text,
        token_ids=list(result.token_ids) or None,
    )
    return msgspec.json.encode(line) + b"\n"
