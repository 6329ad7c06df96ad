"""Replicas of one target over the day: asked for, started, ready, drained, gone. A simulated clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Fleet:
    """Replicas of one target. They take ``start_s`` until they serve, and ``drain_s`` until they are gone."""

    start_s: float
    drain_s: float
    ready: int = 0
    starting: list[float] = field(default_factory=list)
    """Times at which these replicas will be ready, ascending."""
    draining: list[float] = field(default_factory=list)
    """Times at which these replicas will be gone, ascending."""

    @property
    def billed(self) -> int:
        """Replicas that occupy a place."""
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
        """Start or end replicas until there are so many. Replicas that have not started end first."""
        while self.ready + len(self.starting) < replicas:
            self.starting.append(at + self.start_s)
        while self.ready + len(self.starting) > replicas and self.starting:
            self.starting.pop()
        while self.ready > replicas:
            self.ready -= 1
            self.draining.append(at + self.drain_s)
