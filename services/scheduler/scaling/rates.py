"""Turns totals that members report into what they do per second of their own uptime. Needs no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from services.messages import LATENCY_BUCKETS, LATENCY_EDGES

BEYOND = 3.0
"""Value of latencies past the last edge, in targets."""
MIN_LATENCIES = 5.0
"""How many latencies, as they fade, a ratio needs."""


class Rates:
    """Rates of each member: totals over its own uptime, fading with ``half_life_s``. A member that is new, or that
    restarted, has no rates until its second report."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._reports: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._rates: dict[str, dict[str, float]] = {}
        self._reported_at: dict[str, float] = {}

    def note(self, member: str, up_s: float, totals: Mapping[str, float], at: float) -> None:
        """Take a report: ``totals`` by name, which grow. The same report may come again."""
        known = self._reports.get(member)
        if known is not None and known[0] == up_s:
            return
        self._reports[member] = up_s, totals
        self._reported_at[member] = at
        if known is None or up_s < known[0]:
            self._rates.pop(member, None)
            return
        passed_s = up_s - known[0]
        rates = {name: (total - known[1].get(name, 0.0)) / passed_s for name, total in totals.items()}
        kept = 0.5 ** (passed_s / self._half_life_s)
        before = self._rates.get(member, rates)
        self._rates[member] = {name: kept * before.get(name, 0.0) + (1 - kept) * new for name, new in rates.items()}

    def total(self, name: str, members: Collection[str]) -> float:
        """Return the sum of the rates of those ``members`` whose rates are known."""
        return sum(self._rates[member].get(name, 0.0) for member in members if member in self._rates)

    def of(self, member: str, name: str) -> float:
        """Return the rate of one member; 0: it is not known yet."""
        return self._rates.get(member, {}).get(name, 0.0)

    def fresh(self, member: str, at: float, within_s: float) -> bool:
        """Say whether the rates of ``member`` are known and it reported lately."""
        return member in self._rates and at - self._reported_at[member] <= within_s

    def keep(self, members: Collection[str]) -> None:
        """Forget all but ``members``."""
        for gone in self._reports.keys() - set(members):
            del self._reports[gone], self._reported_at[gone]
            self._rates.pop(gone, None)


_RECENT = 0.25
"""What two half-lives leave of one latency."""


class Share:
    """The 90th percentile of latencies over their target, of those that were counted lately, fading."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._counts = [0.0] * LATENCY_BUCKETS

    def add(self, counts: Sequence[float], passed_s: float) -> None:
        """Add latencies of the last ``passed_s``, counted by bucket."""
        kept = 0.5 ** (passed_s / self._half_life_s)
        self._counts = [kept * old + new for old, new in zip(self._counts, counts, strict=True)]

    @property
    def counted(self) -> bool:
        """Whether a latency was counted lately, though there may be too few for a ratio."""
        return sum(self._counts) >= _RECENT

    def ratio(self) -> float | None:
        """Return the percentile in targets. None: there are too few latencies."""
        total = sum(self._counts)
        if total < MIN_LATENCIES:
            return None
        within = 0.0
        for edge, count in zip(LATENCY_EDGES, self._counts, strict=False):
            within += count
            if within >= 0.9 * total:
                return edge
        return BEYOND


class Places:
    """How many places are needed by sequences that run and by those that wait for a place.

    A place serves several waiting sequences, one after the other, if they stay for less time than ``line_s``, in which
    the line may empty: so a waiting sequence counts for ``stay / line_s`` places, 1 at most. A line that grew while
    replicas start does not need as many places as it is long. How long sequences stay follows from how many run and end
    (Little's law).
    """

    def __init__(self, half_life_s: float, line_s: float) -> None:
        self._running, self._ended = Smoothed(half_life_s), Smoothed(half_life_s)
        self._line_s = line_s
        self._stay_s = line_s

    def asked(self, running: float, waiting: float, ended: float, passed_s: float) -> float:
        """Return the places asked for, where ``ended`` sequences ended in the last ``passed_s``."""
        if passed_s > 0 and running > 0:
            there, ends_per_s = self._running.add(running, passed_s), self._ended.add(ended / passed_s, passed_s)
            if ends_per_s > 0:
                self._stay_s = there / ends_per_s
        return running + waiting * min(1.0, self._stay_s / self._line_s)


class Smoothed:
    """A level whose past fades."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._level: float | None = None

    def add(self, level: float, passed_s: float) -> float:
        kept = 0.5 ** (passed_s / self._half_life_s)
        self._level = level if self._level is None else kept * self._level + (1 - kept) * level
        return self._level
