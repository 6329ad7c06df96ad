"""What a client asks, turn by turn, before any answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """``content``: text, or token ids where it is the whole prompt. ``result_of``: the tool whose result it is, if the
    answer before called one. ``think_s``: from the answer before until this is due."""

    content: str | Sequence[int]
    output_tokens: int | None
    result_of: str | None = None
    think_s: float = 0.0
    name: str | None = None
    """Class, for figures of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A client with a key of its own. ``share``: of the requests. ``weight``: of what it should get, for fairness."""

    name: str
    share: float = 1.0
    weight: float = 1.0
    priority: int | None = None
    key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Turns of which each waits for the answer to the one before. ``expected``: known answer to a single turn."""

    turns: Sequence[Turn]
    system: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    history: Sequence[dict[str, Any]] = ()
    """Messages of before."""
    tenant: Tenant | None = None


class Source(Protocol):
    """A workload: conversation ``number`` is the same whoever asks, whatever came before."""

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...

    def conversation(self, number: int) -> Conversation: ...
