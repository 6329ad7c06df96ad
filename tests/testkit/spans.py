"""A tracer whose spans stay here."""

from __future__ import annotations

import itertools

from services.runtime.tracing import Span, Tracer
from services.runtime.tracing.allowance import Allowance


class Spans:
    """A sink that keeps what it gets; ids count up."""

    def __init__(self, *, share: float = 1.0, steps: bool = False, clients: Allowance | None = None) -> None:
        self.all: list[Span] = []
        ids = itertools.count(1)
        self.tracer = Tracer(self, share=share, clients=clients, steps=steps, draw=lambda _: next(ids))

    def put(self, span: Span) -> None:
        self.all.append(span)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> Span:
        (found,) = self.named(name)
        return found

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.all]
