"""When a null server answers: known delays, a known capacity, and stalls in which it does nothing at all."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.errors import BadSetting


@dataclass(frozen=True, slots=True)
class Stall:
    """From second ``begin`` on, for ``seconds``."""

    begin: float
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Shares of the requests that are refused with 429, fail with 500, break off in the middle, or get another answer
    than they should. ``retry_after_s``: what refusals ask to wait, None for nothing."""

    refused: float = 0.0
    failed: float = 0.0
    broken: float = 0.0
    wrong: float = 0.0
    retry_after_s: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """``first_s`` from a request's turn to its first token, ``gap_s`` between tokens, ``places`` for requests that are
    served at once (None: any number), first come first served. Stalls are in seconds after the server's epoch."""

    first_s: float = 0.0
    gap_s: float = 0.0
    places: int | None = None
    stalls: Sequence[Stall] = ()
    faults: Faults = Faults()
    tools: bool = True
    seed: int = 0

    def capacity(self, tokens: float) -> float | None:
        """Returns the answers of ``tokens`` that it gives a second at most: the knee of its latency."""
        service_s = self.first_s + self.gap_s * max(0.0, tokens - 1)
        return None if self.places is None or not service_s else self.places / service_s

    def released(self, moment: float) -> float:
        """Returns ``moment``, or the end of the stall that it falls into."""
        for stall in self.stalls:
            if stall.begin <= moment < stall.end:
                return stall.end
        return moment


@dataclass(slots=True)
class Turns:
    """Gives requests their turns. Moments are seconds after the epoch."""

    behaviour: Behaviour
    _free: list[float] = field(default_factory=list)
    """When each place becomes free."""

    def dues(self, arrival: float, tokens: int) -> list[float]:
        """Returns when each token of a request that came at ``arrival`` is to be written."""
        behaviour = self.behaviour
        begin = behaviour.released(arrival)
        if behaviour.places is not None and len(self._free) >= behaviour.places:
            begin = max(begin, heapq.heappop(self._free))
        first = begin + behaviour.first_s
        dues = [behaviour.released(first + number * behaviour.gap_s) for number in range(tokens)]
        if behaviour.places is not None:
            heapq.heappush(self._free, dues[-1] if dues else first)
        return dues


def parse_stall(text: str) -> Stall:
    """Returns the stall of a setting, ``BEGIN:SECONDS``.

    Raises:
        BadSetting: it is none.
    """
    begin, _, seconds = text.partition(":")
    try:
        return Stall(float(begin), float(seconds))
    except ValueError as error:
        raise BadSetting(f"{text!r} is no stall.", hint="Write BEGIN:SECONDS, such as 5:1.") from error


class Luck:
    """Draws what becomes of each request, in the order in which they come."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults, self._rng = faults, random.Random(f"luck {seed}")
        self._none = not (faults.refused or faults.failed or faults.broken or faults.wrong)

    def draw(self) -> str:
        """Returns ``refused``, ``failed``, ``broken``, ``wrong`` or ``ok``."""
        if self._none:
            return "ok"
        number = self._rng.random()
        for name in ("refused", "failed", "broken", "wrong"):
            number -= getattr(self._faults, name)
            if number < 0:
                return name
        return "ok"
