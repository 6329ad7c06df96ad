"""Decides by measured time how long chains of drafts are for a batch of so many sequences; 0: there are none.

Drafts cost rows, rows wake experts, and a step with drafts is launched only once the one before it is read. How much
that costs depends on model, device, layout and batch; how much it gains, on the text. Both are measured as one: tokens
of a sequence in a second, by the length of chains, for batches of about as many sequences. The best length is used, and
now and then another one is tried. What trials have cost bounds how soon the next one comes. Pure Python.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

STEPS = 32
"""Steps by which the length in use is judged."""
TRIAL_STEPS = 8
"""Steps of a trial."""
UNUSUAL_STEPS = 2
"""Steps after a change of length that say nothing: the first of them were launched before it."""
MIN_GAIN = 0.03
"""What another length must gain to be used. Less may be noise."""
HOPELESS = 0.5
"""A trial that is so slow ends early."""
BUDGET = 0.02
"""Share of the time that trials may cost."""
_SLOWEST = 3.0
"""A step that took longer than so many usual ones was disturbed, and counts as so many."""


def depths(most: int) -> tuple[int, ...]:
    """Return the lengths that are tried, ascending.

    >>> depths(5), depths(1)
    ((0, 1, 2, 5), (0, 1))
    """
    lengths = {0, most}
    while most > 1:
        most //= 2
        lengths.add(most)
    return tuple(sorted(lengths))


@dataclass(slots=True)
class _Rate:
    """Steps of one length: (tokens of a sequence, seconds)."""

    seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STEPS))

    @property
    def per_second(self) -> float:
        steps = self._undisturbed
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)

    def lost_s(self, per_second: float) -> float:
        """Return how much sooner the same tokens would have come at ``per_second``."""
        return max(0.0, sum(seconds - tokens / per_second for tokens, seconds in self._undisturbed))

    @property
    def _undisturbed(self) -> list[tuple[float, float]]:
        most = _SLOWEST * median(seconds for _, seconds in self.seen)
        return [(tokens, min(seconds, most)) for tokens, seconds in self.seen]


@dataclass(slots=True)
class _Batches:
    """Batches of about as many sequences."""

    lengths: tuple[int, ...]
    best: int
    tried: int | None = None
    left: int = TRIAL_STEPS
    """Steps before a trial begins or ends. The first one comes soon: whether drafts gain at all is not known yet."""
    pause_s: float = 0.0
    """Seconds of steps before the next trial, to pay for what the last one has shown to be slower."""
    skipped: int = UNUSUAL_STEPS
    turn: int = 0
    judged: bool = False
    """Whether two lengths have been compared."""
    rates: dict[int, _Rate] = field(default_factory=dict)

    @property
    def now(self) -> int:
        return self.best if self.tried is None else self.tried

    def note(self, tokens: float, seconds: float) -> None:
        if self.skipped:
            self.skipped -= 1
            return
        self.rates.setdefault(self.now, _Rate()).seen.append((tokens, seconds))
        self.left -= 1
        if self.tried is not None:
            if self.left <= 0 or self._hopeless:
                self._judge(self.tried)
        elif self._disappoints:
            self._try(0)
        else:
            self.pause_s -= seconds
            if self.left <= 0 and self.pause_s <= 0:
                self._try(self._next())

    @property
    def _hopeless(self) -> bool:
        assert self.tried is not None
        return self.left <= TRIAL_STEPS // 2 and self._rate(self.tried) < HOPELESS * self._rate(self.best)

    @property
    def _disappoints(self) -> bool:
        """Whether drafts have become worse than none, as far as that is known."""
        known = self.best > 0 and 0 in self.rates and len(self.rates[self.best].seen) >= TRIAL_STEPS
        return known and self._rate(0) > (1 + MIN_GAIN) * self._rate(self.best)

    def _rate(self, length: int) -> float:
        return self.rates[length].per_second

    def _next(self) -> int:
        """Return which length is tried next: first none, then the others in turn."""
        others = [length for length in self.lengths if length != self.best]
        self.turn += 1
        return others[(self.turn - 1) % len(others)]

    def _try(self, length: int) -> None:
        self.rates[length] = _Rate()
        self.tried, self.left, self.skipped = length, TRIAL_STEPS, UNUSUAL_STEPS

    def _judge(self, tried: int) -> None:
        usual, found = self._rate(self.best), self._rate(tried)
        wins = found > (1 + MIN_GAIN) * usual
        slower = self.best if wins else tried
        self.pause_s = self.rates[slower].lost_s(max(usual, found)) / BUDGET
        if wins:
            self.best = tried
        self.tried, self.left, self.skipped, self.judged = None, STEPS, UNUSUAL_STEPS, True


class Gate:
    """The gate of one engine. ``most``: the longest chain."""

    def __init__(self, most: int) -> None:
        self._lengths = depths(most)
        self._batches: dict[int, _Batches] = {}

    def depth(self, sequences: int) -> int:
        """Return how many drafts each of so many sequences may have in the next step."""
        return self._of(sequences).now

    def known_depth(self, sequences: int) -> int:
        """Return how many drafts have been shown to be best for each of so many sequences; 0 where nothing has."""
        known = self._of(sequences)
        return known.best if known.judged else 0

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        """Learn from a step without prompts, which drew ``tokens`` for its sequences."""
        if seconds > 0:
            self._of(sequences).note(tokens / sequences, seconds)

    def _of(self, sequences: int) -> _Batches:
        """Return what is known of batches of about so many sequences: at first, what is best for the nearest others."""
        size = sequences.bit_length()
        if size not in self._batches:
            judged = [(abs(other - size), known.best) for other, known in self._batches.items() if known.judged]
            best = min(judged)[1] if judged else self._lengths[-1]
            self._batches[size] = _Batches(lengths=self._lengths, best=best)
        return self._batches[size]
