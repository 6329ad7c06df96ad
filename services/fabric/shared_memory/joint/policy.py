"""Decides which steps of a seat's clients begin together, and how long a step is held for another one.

Clients whose steps run together share each read of the experts' weights, and run as slowly as the slowest of them. The
policy times both ways for each size of steps, keeps the faster way and tries the slower one again from time to time.
Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

REST = 10
"""A pause of more periods than this is a rest of the client, and no measurement of the way in which its step ran."""
SLACK_S, SLACK_SHARE = 0.0003, 0.05
"""A step may begin later than expected by these seconds and this share of its period."""
FORGET_S = 1.0
"""A client that begins no step for so long is no longer expected."""
SAMPLES = 32
"""Number of steps of each client by which a way is judged."""
MIN_GAIN = 0.02
FIRST_BAR_S, MAX_BAR_S = 2.0, 256.0
FIRST_RETRY, LAST_RETRY = 16, 256
"""The slower way is tried again after so many trials' lengths: at first, and after it has lost many times."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Places of the clients to wait for, whose steps are expected within ``seconds``."""

    places: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class _Size:
    """Measurements for steps of about the same number of rows, of so many clients, which run ``together`` or alone now.

    ``seconds`` has the mean period of each way. ``left`` counts trials' lengths until the way changes; 0 is a trial.
    """

    clients: int
    together: bool = True
    seconds: dict[bool, float] = field(default_factory=dict)
    seen: list[float] = field(default_factory=list)
    left: int = 0
    pause: int = FIRST_RETRY

    def note(self, period_s: float) -> None:
        """Add the period of a step that ran the current way."""
        self.seen.append(period_s)
        if len(self.seen) < SAMPLES * self.clients:
            return
        self.seconds[self.together] = mean(self.seen)
        self.seen.clear()
        if self.left > 1:
            self.left -= 1
        elif self.left == 1:  # a trial of the other way begins
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
    """When one client's last step came and ``began``, after it was held, and whether it ran ``together`` with others.

    ``takes_s`` has the seconds from the begin of a step to the arrival of the next, by ``together``. ``size`` is None
    if no other client was active.
    """

    came: float
    began: float
    together: bool = False
    takes_s: dict[bool, float] = field(default_factory=dict)
    size: _Size | None = None

    def due_s(self, now: float) -> float:
        """Return the seconds until the next step should have come; less than 0 where that time has passed."""
        takes_s = self.takes_s[self.together]
        return self.began + takes_s * (1 + SLACK_SHARE) + SLACK_S - now

    def active(self, now: float) -> bool:
        """Return whether the time of the next step is known, and has not long passed."""
        takes_s = self.takes_s.get(self.together)
        return takes_s is not None and now - self.began < min(FORGET_S, 3 * takes_s)


class JoinPolicy:
    """Holds steps of one seat's clients. The caller holds a lock. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._barred: dict[int, tuple[float, float]] = {}
        """Place of a client that was late -> until when, and how long, it runs alone."""
        self._paces: dict[int, _Pace] = {}
        self._sizes: dict[tuple[int, int], _Size] = {}

    def come(self, place: int, rows: int, now: float, max_s: float) -> Hold | None:
        """Note a step of up to ``rows`` rows; return for whom to hold it, at most ``max_s``; None: begin it alone."""
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
        others = {at: other for at, other in self._paces.items() if at != place and other.active(now)}
        if not others:
            return None
        clients = len(others) + 1
        pace.size = self._sizes.setdefault((rows.bit_length(), clients), _Size(clients))
        return self._hold(pace, others, now, max_s) if pace.size.together else None

    def began(self, place: int, now: float, *, together: bool) -> None:
        """Note that the client's last step begins, in a joint step or alone."""
        if pace := self._paces.get(place):
            pace.began, pace.together = now, together

    def rest(self, place: int) -> None:
        """Forget the client's times, so that no step is held for it."""
        self._paces.pop(place, None)

    def failed(self, place: int, now: float) -> float:
        """Let a client that was too late for a joint step run alone; return for how many seconds, each time twice."""
        seconds = min(MAX_BAR_S, 2 * self._barred.get(place, (0.0, FIRST_BAR_S / 2))[1])
        self._barred[place] = now + seconds, seconds
        return seconds

    def leave(self, place: int) -> None:
        """Forget everything about a client that has left."""
        self.rest(place)
        self._barred.pop(place, None)

    def _hold(self, pace: _Pace, others: dict[int, _Pace], now: float, max_s: float) -> Hold:
        """Hold for clients due within half a step: of two clients one is always so close behind the other."""
        max_s = min(max_s, pace.takes_s[pace.together] * (0.5 + SLACK_SHARE) + SLACK_S)
        soon = {at: due_s for at, other in others.items() if 0 < (due_s := other.due_s(now)) <= max_s}
        return Hold(tuple(soon), max(soon.values())) if soon else Hold()
