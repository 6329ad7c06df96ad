"""Prompts of a user's file.

ShareGPT: a JSON list of {"conversations": [{"from": "human" or "gpt", "value": text}, ...]}. JSON lines: {"prompt":
text or token ids} or {"messages": [...]}, each with "max_tokens" (or "output_tokens", or the length of "output_ids")
and "name" (or "topic", "domain") where it is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from loadgen.errors import FileUnusable
from loadgen.workload.conversation import Conversation, Turn


class _Said(msgspec.Struct):
    sender: str = msgspec.field(name="from")
    value: str


class _Shared(msgspec.Struct):
    conversations: list[_Said] = []


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    output_tokens: int | None = None
    output_ids: list[int] | None = None
    name: str | None = None
    topic: str | None = None
    domain: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FromFile:
    """A file's conversations, in its order, again from the first after the last."""

    kind: ClassVar[str] = "file"
    conversations: Sequence[Conversation]
    text: str

    def conversation(self, number: int) -> Conversation:
        return self.conversations[number % len(self.conversations)]


def read_prompts(path: Path, *, most_tokens: int) -> FromFile:
    """Returns the workload of a file. Answers of unknown length may have ``most_tokens``.

    Raises:
        FileUnusable: there is no such file, it has no prompts or another form.
    """
    try:
        content = path.expanduser().read_bytes()
    except OSError as error:
        raise FileUnusable(f"Cannot read the prompts {path}: {error.strerror}.") from error
    try:
        found = _share_gpt(content, most_tokens) if content.lstrip()[:1] == b"[" else _lines(content, most_tokens)
    except msgspec.MsgspecError as error:
        raise FileUnusable(f"{path} is of no known form: {error}.", hint=str(__doc__).split("\n\n")[1]) from error
    if not found:
        raise FileUnusable(f"{path} has no prompts.")
    return FromFile(conversations=found, text=f"{len(found)} conversations of {path.name}")


def _share_gpt(content: bytes, most_tokens: int) -> list[Conversation]:
    every = msgspec.json.decode(content, type=list[_Shared])
    return [Conversation(turns=turns) for each in every if (turns := _turns(each.conversations, most_tokens))]


def _turns(said: Sequence[_Said], most_tokens: int) -> tuple[Turn, ...]:
    """Answers may be as long as the recorded ones, by 4/3 tokens a word."""
    turns: list[Turn] = []
    for each, after in itertools.zip_longest(said, said[1:]):
        if each.sender in ("human", "user") and each.value:
            words = len(after.value.split()) if after is not None and after.sender not in ("human", "user") else 0
            tokens = min(most_tokens, round(words * 4 / 3) or most_tokens)
            turns.append(Turn(content=each.value, output_tokens=tokens, name=f"turn {len(turns) + 1}"))
    return tuple(turns)


def _lines(content: bytes, most_tokens: int) -> list[Conversation]:
    decoder = msgspec.json.Decoder(_Line)
    lines = [decoder.decode(line) for line in content.splitlines() if line.strip()]
    return [found for line in lines if (found := _of_line(line, most_tokens))]


def _of_line(line: _Line, most_tokens: int) -> Conversation | None:
    tokens = line.max_tokens or line.output_tokens or min(most_tokens, len(line.output_ids or ()) or most_tokens)
    name = line.name or line.topic or line.domain
    if line.prompt:
        return Conversation(turns=(Turn(content=line.prompt, output_tokens=tokens, name=name),))
    *history, last = line.messages or [{}]
    if not isinstance(text := last.get("content"), str):
        return None
    return Conversation(history=history, turns=(Turn(content=text, output_tokens=tokens, name=name),))
