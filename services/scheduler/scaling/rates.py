"""From totals that members tell, now and then, to what they do per second of their own. No clock of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from services.messages import LATENCY_BUCKETS, LATENCY_EDGES

BEYOND = 3.0
"""What counts for latencies past the last edge: times the target."""
FEWEST = 5.0
"""Latencies, as they fade, that tell something."""


class Rates:
    """Of each member: totals against its own uptime, fading by ``half_life_s`` of that. A member that began anew, or
    that is new, says nothing until its second report."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._told: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._rates: dict[str, dict[str, float]] = {}
        self._heard_at: dict[str, float] = {}

    def tell(self, member: str, up_s: float, totals: Mapping[str, float], at: float) -> None:
        """``totals`` grow, by name; the same report may come again."""
        known = self._told.get(member)
        if known is not None and known[0] == up_s:
            return
        self._told[member] = up_s, totals
        self._heard_at[member] = at
        if known is None or up_s < known[0]:
            self._rates.pop(member, None)
            return
        passed_s = up_s - known[0]
        rates = {name: (total - known[1].get(name, 0.0)) / passed_s for name, total in totals.items()}
        kept = 0.5 ** (passed_s / self._half_life_s)
        before = self._rates.get(member, rates)
        self._rates[member] = {name: kept * before.get(name, 0.0) + (1 - kept) * new for name, new in rates.items()}

    def total(self, name: str, members: Collection[str]) -> float:
        """Of those ``members`` whose rates are known, per second of each."""
        return sum(self._rates[member].get(name, 0.0) for member in members if member in self._rates)

    def of(self, member: str, name: str) -> float:
        """Per second; 0: not known yet."""
        return self._rates.get(member, {}).get(name, 0.0)

    def fresh(self, member: str, at: float, within_s: float) -> bool:
        """Whether its rates are known and it was heard lately."""
        return member in self._rates and at - self._heard_at[member] <= within_s

    def keep(self, members: Collection[str]) -> None:
        """Forget all others."""
        for gone in self._told.keys() - set(members):
            del self._told[gone], self._heard_at[gone]
            self._rates.pop(gone, None)


_HEARD = 0.25
"""What two half-lives leave of one latency."""


class Share:
    """Nine of ten latencies were within so many times their target: of what was counted lately, fading."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._counts = [0.0] * LATENCY_BUCKETS

    def add(self, counts: Sequence[float], passed_s: float) -> None:
        """``counts`` came in the last ``passed_s``."""
        kept = 0.5 ** (passed_s / self._half_life_s)
        self._counts = [kept * old + new for old, new in zip(self._counts, counts, strict=True)]

    @property
    def heard(self) -> bool:
        """Whether one was counted lately, be they too few to tell."""
        return sum(self._counts) >= _HEARD

    def ratio(self) -> float | None:
        """None: too few to tell."""
        total = sum(self._counts)
        if total < FEWEST:
            return None
        within = 0.0
        for edge, count in zip(LATENCY_EDGES, self._counts, strict=False):
            within += count
            if within >= 0.9 * total:
                return edge
        return BEYOND


class Places:
    """How many places are asked for by sequences that run and by those that wait for a place.

    A place serves several that wait, one after the other, if they stay for less time than the line may take to go: so
    one that waits counts for ``stay / line_s`` places, 1 at most. A line that grew while replicas start does not ask
    for as many as it is long. How long sequences stay is known from how many run and end (Little's law).
    """

    def __init__(self, half_life_s: float, line_s: float) -> None:
        self._running, self._ended = Smoothed(half_life_s), Smoothed(half_life_s)
        self._line_s = line_s
        self._stay_s = line_s

    def asked(self, running: float, waiting: float, ended: float, passed_s: float) -> float:
        """``ended`` in the last ``passed_s``."""
        if passed_s > 0 and running > 0:
            there, ends_per_s = self._running.add(running, passed_s), self._ended.add(ended / passed_s, passed_s)
            if ends_per_s > 0:
                self._stay_s = there / ends_per_s
        return running + waiting * min(1.0, self._stay_s / self._line_s)


class Smoothed:
    """A level, fading."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._level: float | None = None

    def add(self, level: float, passed_s: float) -> float:
        kept = 0.5 ** (passed_s / self._half_life_s)
        self._level = level if self._level is None else kept * self._level + (1 - kept) * level
        return self._level
