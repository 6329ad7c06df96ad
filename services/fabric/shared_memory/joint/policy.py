"""Which steps of a seat's clients are to begin together, and how long one is held for another.

Clients whose steps run together share each read of the experts' weights, and go at the pace of the slowest. Whether
that is faster is measured, by size of steps: both ways are timed, the faster one is kept, and the other tried again now
and then. Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

REST = 10
"""Periods after which a client has rested rather than been slow: that tells nothing about the way its step ran."""
SLACK_S, SLACK_SHARE = 0.0003, 0.05
"""How much later than expected a step may begin: this and a share of its period."""
FORGET_S = 1.0
"""A client that begins no step for so long is not one of those that take turns."""
SAMPLES = 32
"""Steps of each client by which a way is judged."""
MIN_GAIN = 0.02
FIRST_BAR_S, MAX_BAR_S = 2.0, 256.0
FIRST_RETRY, LAST_RETRY = 16, 256
"""Trials' lengths after which the slower way is tried again: at first, and after it has kept losing."""


@dataclass(frozen=True, slots=True)
class Hold:
    """``places``: of clients whose steps are to begin within ``seconds``."""

    places: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class _Size:
    """Steps of about as many rows, of so many clients."""

    clients: int
    together: bool = True
    seconds: dict[bool, float] = field(default_factory=dict)
    seen: list[float] = field(default_factory=list)
    left: int = 0
    """Trials' lengths before the way that runs is judged again; 0: it is on trial."""
    pause: int = FIRST_RETRY

    def note(self, period_s: float) -> None:
        """Of a step that ran the way that :attr:`together` says, or began to."""
        self.seen.append(period_s)
        if len(self.seen) < SAMPLES * self.clients:
            return
        self.seconds[self.together] = mean(self.seen)
        self.seen.clear()
        if self.left > 1:
            self.left -= 1
        elif self.left == 1:  # the other way's turn
            self.left, self.together = 0, not self.together
        elif len(self.seconds) < 2:
            self.together = not self.together
        else:
            self._judge()

    def _judge(self) -> None:
        tried = self.together
        pays = self.seconds[True] < (1 - MIN_GAIN) * self.seconds[False]
        self.pause = FIRST_RETRY if pays == tried else min(2 * self.pause, LAST_RETRY)
        self.together, self.left = pays, self.pause


@dataclass(slots=True)
class _Pace:
    """Of a client. ``came`` and ``began``: its last step, which then was held or not, and ran ``together`` or alone;
    ``takes_s``: how long such a step takes until the next one comes; ``size``: None if it was not one of several
    clients'."""

    came: float
    began: float
    together: bool = False
    takes_s: dict[bool, float] = field(default_factory=dict)
    size: _Size | None = None

    def due_s(self, now: float) -> float:
        """Until its next step has come, if it comes as expected; less than 0 where it is later already."""
        takes_s = self.takes_s[self.together]
        return self.began + takes_s * (1 + SLACK_SHARE) + SLACK_S - now

    def active(self, now: float) -> bool:
        """Whether it is known when its next step comes, and that is not long ago."""
        takes_s = self.takes_s.get(self.together)
        return takes_s is not None and now - self.began < min(FORGET_S, 3 * takes_s)


class JoinPolicy:
    """For one thread at a time. Times in seconds, of any one clock."""

    def __init__(self) -> None:
        self._barred: dict[int, tuple[float, float]] = {}
        """Until when, and how long, a client that was late runs alone."""
        self._paces: dict[int, _Pace] = {}
        self._sizes: dict[tuple[int, int], _Size] = {}

    def come(self, place: int, rows: int, now: float, most_s: float) -> Hold | None:
        """A client's step of up to ``rows`` comes: for whom it is to be held, for ``most_s`` at most; None: it begins
        alone."""
        if now < self._barred.get(place, (0.0, 0.0))[0]:
            self.rest(place)
            return None
        pace = self._paces.setdefault(place, _Pace(now - FORGET_S, now - FORGET_S))
        period_s, pace.came = now - pace.came, now
        size, pace.size = pace.size, None
        if period_s >= FORGET_S:
            pace.takes_s.clear()
            return None
        before_s = pace.takes_s.get(pace.together, period_s)
        pace.takes_s[pace.together] = now - pace.began
        if size is not None and period_s < REST * before_s:
            size.note(period_s)
        others = {other: one for other, one in self._paces.items() if other != place and one.active(now)}
        if not others:
            return None
        clients = len(others) + 1
        pace.size = self._sizes.setdefault((rows.bit_length(), clients), _Size(clients))
        return self._hold(pace, others, now, most_s) if pace.size.together else None

    def began(self, place: int, now: float, *, together: bool) -> None:
        """The step that came begins, with those of others or alone."""
        if pace := self._paces.get(place):
            pace.began, pace.together = now, together

    def rest(self, place: int) -> None:
        """Its steps are not to be joined now: nobody is held for it."""
        self._paces.pop(place, None)

    def failed(self, place: int, now: float) -> float:
        """It was left out of a step with others, being late, and had to run that again. Seconds for which it is to run
        alone: each time twice as many."""
        seconds = min(MAX_BAR_S, 2 * self._barred.get(place, (0.0, FIRST_BAR_S / 2))[1])
        self._barred[place] = now + seconds, seconds
        return seconds

    def leave(self, place: int) -> None:
        self.rest(place)
        self._barred.pop(place, None)

    def _hold(self, pace: _Pace, others: dict[int, _Pace], now: float, most_s: float) -> Hold:
        """For those that come within half a step: of two clients one is always so close behind the other."""
        most_s = min(most_s, pace.takes_s[pace.together] * (0.5 + SLACK_SHARE) + SLACK_S)
        soon = {other: due_s for other, one in others.items() if 0 < (due_s := one.due_s(now)) <= most_s}
        return Hold(tuple(soon), max(soon.values())) if soon else Hold()
