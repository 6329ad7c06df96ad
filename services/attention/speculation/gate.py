"""Decides by measured time how many drafts sequences have in a batch of so many: how long chains of them are, and how
many make a tree.

Drafts cost rows, rows wake experts, and a step with drafts is launched only once the one before it is read. How much
that costs depends on model, device, layout and batch; how much it gains, on the text. Both are measured as one: tokens
of a sequence in a second, by the amount of drafts, for batches of about as many sequences. The best amount is used, and
now and then another one is tried. What trials have cost bounds how soon the next one comes. Pure Python.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

STEPS = 32
"""Steps by which the amount in use is judged."""
TRIAL_STEPS = 8
"""Steps of a trial."""
FIRST_STEPS = 4
"""Steps by which what a size of batch begins with is judged at first. Nothing bounds yet what they cost."""
UNUSUAL_STEPS = 2
"""Steps after a change of amount that say nothing: the first of them were launched before it."""
MIN_GAIN = 0.03
"""What another amount must gain to be used. Less may be noise."""
HOPELESS = 0.5
"""A trial that is so slow ends early."""
BUDGET = 0.02
"""Share of the time that trials may cost."""
_SLOWEST = 3.0
"""A step that took longer than so many usual ones was disturbed, and counts as so many."""


class Amount(NamedTuple):
    """Drafts of a sequence in a step: ``branches`` chains at most, of ``depth`` tokens at most."""

    depth: int = 0
    branches: int = 0


NONE = Amount()


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


def amounts(most: int, branches: int) -> tuple[Amount, ...]:
    """Return the amounts that are tried: chains of each length, and trees of the longest ones.

    >>> [tuple(each) for each in amounts(2, 4)]
    [(0, 0), (1, 1), (2, 1), (2, 2), (2, 4)]
    """
    _, *chains = depths(most)
    trees = [each for each in depths(branches) if each > 1]
    return NONE, *(Amount(depth, 1) for depth in chains), *(Amount(most, each) for each in trees)


@dataclass(slots=True)
class _Rate:
    """Steps of one amount: (tokens of a sequence, seconds)."""

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

    amounts: tuple[Amount, ...]
    best: Amount
    tried: Amount | None = None
    left: int = FIRST_STEPS
    """Steps before a trial begins or ends. The first one comes soon: whether drafts gain at all is not known yet."""
    pause_s: float = 0.0
    """Seconds of steps before the next trial, to pay for what the last one has shown to be slower."""
    skipped: int = UNUSUAL_STEPS
    turn: int = 0
    charged_s: float = 0.0
    """Seconds that trials took beside their steps, and that the next pause pays for."""
    judged: bool = False
    """Whether two amounts have been compared."""
    rates: dict[Amount, _Rate] = field(default_factory=dict)

    @property
    def now(self) -> Amount:
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
            self._try(NONE)
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
        known = self.best != NONE and NONE in self.rates and len(self.rates[self.best].seen) >= TRIAL_STEPS
        return known and self._rate(NONE) > (1 + MIN_GAIN) * self._rate(self.best)

    def _rate(self, amount: Amount) -> float:
        return self.rates[amount].per_second

    def _next(self) -> Amount:
        """Return which amount is tried next: first none, then the others in turn."""
        others = [amount for amount in self.amounts if amount != self.best]
        self.turn += 1
        return others[(self.turn - 1) % len(others)]

    def _try(self, amount: Amount) -> None:
        self.rates[amount] = _Rate()
        self.tried, self.left, self.skipped = amount, TRIAL_STEPS, UNUSUAL_STEPS

    def _judge(self, tried: Amount) -> None:
        usual, found = self._rate(self.best), self._rate(tried)
        wins = found > (1 + MIN_GAIN) * usual
        slower = self.rates[self.best if wins else tried]
        unseen = 1 + UNUSUAL_STEPS / len(slower.seen)  # they were as slow
        self.pause_s = (unseen * slower.lost_s(max(usual, found)) + self.charged_s) / BUDGET
        self.charged_s = 0.0
        if wins:
            self.best = tried
        self.tried, self.left, self.skipped, self.judged = None, STEPS, UNUSUAL_STEPS, True


class Gate:
    """The gate of one engine. ``most``: the longest chain; ``branches``: most chains of a tree."""

    def __init__(self, most: int, branches: int = 1) -> None:
        self._amounts = amounts(most, branches)
        self._batches: dict[int, _Batches] = {}

    def amount(self, sequences: int) -> Amount:
        """Return how many drafts each of so many sequences may have in the next step."""
        return self._of(sequences).now

    def known_amount(self, sequences: int) -> Amount:
        """Return how many drafts have been shown to be best for each of so many sequences; none where nothing has."""
        known = self._of(sequences)
        return known.best if known.judged else NONE

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        """Learn from a step without prompts, which drew ``tokens`` for its sequences."""
        if seconds > 0:
            self._of(sequences).note(tokens / sequences, seconds)

    def charge(self, sequences: int, seconds: float) -> None:
        """Count time that a step of so many sequences needed before there could be drafts, and the next will not."""
        self._of(sequences).charged_s += seconds

    def likely(self, sequences: int) -> bool:
        """Return whether each of so many sequences will probably have drafts, once they decode."""
        known = self._batches.get(sequences.bit_length())
        return (self._nearest(sequences.bit_length()) if known is None else known.now) != NONE

    def _of(self, sequences: int) -> _Batches:
        """Return what is known of batches of about so many sequences: at first, what is best for the nearest others."""
        size = sequences.bit_length()
        if size not in self._batches:
            self._batches[size] = _Batches(amounts=self._amounts, best=self._nearest(size))
        return self._batches[size]

    def _nearest(self, size: int) -> Amount:
        judged = [(abs(other - size), known.best) for other, known in self._batches.items() if known.judged]
        return min(judged)[1] if judged else self._amounts[-1]
