"""The messages that gpt-oss writes in one answer (OpenAI's harmony format): tokens in, which part each belongs to out.

    <|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Say.<|return|>

A message is a header, between a mark and ``<|message|>``, and a text. The header names a channel, and the recipient
``to=NAME`` if the message is for a tool. What the channel ``final`` says is the answer's content, and so is what
``commentary`` says to nobody in particular; ``analysis`` is reasoning. Messages to tools are reasoning until tool calls
are answered as such: :meth:`Channels._kind_of` is the one place that decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.gateway.detokenize import detokenizer
from services.gateway.parts import PartKind
from services.gateway.tokenizer import TextCodec

FAMILIES = ("gpt_oss",)
"""Families of models that answer so."""
_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_NAME = re.compile(r"\s*([A-Za-z_]+)")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_TO_TOOL = ("to", " to", "to=", " to=")
"""What a recipient begins with."""
_MAX_HEADER_TOKENS = 256
"""A header of more is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Ids of the control tokens around messages. Others, as before the type of a tool's input, have no text."""

    start: int
    channel: int
    message: int
    end: int


def marks_of(family: str, codec: TextCodec) -> Marks | None:
    """Returns the marks of a model whose answers have channels; None for others."""
    ids = [codec.tokenizer.token_to_id(token) for token in (_START, _CHANNEL, _MESSAGE, _END)]
    if family not in FAMILIES or None in ids:
        return None
    start, channel, message, end = ids
    return Marks(start=start, channel=channel, message=message, end=end)  # type: ignore[arg-type]


class Channels:
    """Reads the tokens of one answer. ``prompt`` is what it continues, mostly ``<|start|>assistant``: an answer that
    goes on without a header there, or a prompt without such marks, is content."""

    def __init__(self, marks: Marks, codec: TextCodec, prompt: Sequence[int]) -> None:
        self._marks, self._codec = marks, codec
        self._header: list[int] | None = None  # of the message that begins
        self._channel_at: int | None = None  # where its channel stands in it
        self._plain = False  # whether a word may follow, so that there is no header after all
        self._kind: PartKind | None = "content"
        self._seen: set[PartKind] = set()
        self._joint = False  # whether the next text begins another message of its kind
        self._text = detokenizer(codec, prompt)
        self.reasoning_tokens = 0
        for token_id in _since_last(prompt, marks.start):
            self._place(token_id)
        self._plain = self._header is not None and self._channel_at is None

    def push(self, token_id: int) -> tuple[PartKind, str]:
        """Returns the text that is final with a token, and whose it is."""
        before = self._kind
        if self._place(token_id):
            return before or "content", self._text.flush()
        if self._kind is None:
            return "content", ""
        self.reasoning_tokens += self._kind == "reasoning"
        return self._kind, self._joined(self._text.push(token_id))

    def flush(self) -> tuple[PartKind, str]:
        """Returns the text that was held back."""
        return self._kind or "content", self._text.flush()

    def _joined(self, piece: str) -> str:
        """Returns ``piece``, in a line of its own where a message goes before it that is of its kind."""
        if not piece or self._kind is None:
            return piece
        first, self._joint = self._joint, False
        again = first and self._kind in self._seen
        self._seen.add(self._kind)
        return f"\n{piece}" if again else piece

    def _place(self, token_id: int) -> bool:
        """Takes a token; returns whether it is a mark. Others belong to the header that is open, or to ``_kind``."""
        marks, plain = self._marks, self._plain
        self._plain = False
        if token_id in (marks.start, marks.channel):
            self._open(channel=token_id == marks.channel)
        elif token_id == marks.message:
            self._kind, self._joint = self._kind_of(self._header or [], self._channel_at), True
            self._header = self._channel_at = None
        elif token_id == marks.end:
            self._header, self._channel_at, self._kind, self._joint = None, None, "content", True
        elif self._header is None:
            return False
        elif (plain and not self._is_recipient(token_id)) or len(self._header) >= _MAX_HEADER_TOKENS:
            self._header, self._kind = None, "content"
            return False
        else:
            self._header.append(token_id)
            return False
        return True

    def _open(self, *, channel: bool) -> None:
        """Begins a header, or the channel in one."""
        if self._header is None or not channel:
            self._header = []
        self._channel_at = len(self._header) if channel else None
        self._kind = None

    def _is_recipient(self, token_id: int) -> bool:
        return self._codec.token_text(token_id) in _TO_TOOL

    def _kind_of(self, header: Sequence[int], channel_at: int | None) -> PartKind:
        """Returns whose the text behind a header is."""
        text = self._codec.decode(list(header))
        named = None if channel_at is None else _NAME.match(self._codec.decode(list(header[channel_at:])))
        channel = named[1] if named else "final"
        return "content" if channel != "analysis" and not _RECIPIENT.search(text) else "reasoning"


def _since_last(token_ids: Sequence[int], start: int) -> Iterable[int]:
    """Returns the ids from the last ``start`` on; none where it is not among them."""
    for at in range(len(token_ids) - 1, -1, -1):
        if token_ids[at] == start:
            return token_ids[at:]
    return ()
