"""Replicas of one target over the day: asked for, started, ready, drained, gone. A simulated clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Fleet:
    """``start_s``: from the wish to a replica that serves; ``drain_s``: from the other wish until it is gone."""

    start_s: float
    drain_s: float
    ready: int = 0
    starting: list[float] = field(default_factory=list)
    """When each is ready, ascending."""
    draining: list[float] = field(default_factory=list)
    """When each is gone, ascending."""

    @property
    def billed(self) -> int:
        """Whatever occupies its place."""
        return self.ready + len(self.starting) + len(self.draining)

    @property
    def computing(self) -> int:
        return self.ready + len(self.draining)

    def advance(self, at: float) -> None:
        while self.starting and self.starting[0] <= at:
            self.starting.pop(0)
            self.ready += 1
        while self.draining and self.draining[0] <= at:
            self.draining.pop(0)

    def want(self, replicas: int, at: float) -> None:
        """The same wish again changes nothing. Of too many, those that have not started go first."""
        while self.ready + len(self.starting) < replicas:
            self.starting.append(at + self.start_s)
        while self.ready + len(self.starting) > replicas and self.starting:
            self.starting.pop()
        while self.ready > replicas:
            self.ready -= 1
            self.draining.append(at + self.drain_s)
