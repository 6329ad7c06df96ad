"""Decides whether a step runs as two micro-batches, so that attention of one hides exchange and experts of the other.

Splitting makes smaller products and twice the calls, so it pays only where the exchange takes long enough. The policy
measures that, by number of rows: it times both ways, keeps the faster one, and tries the other now and then. Pure
Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Literal

Mode = Literal["auto", "on", "off"]

SAMPLES = 7
"""Steps by which a way is judged: their median tolerates three disturbed ones. In a trial the ways alternate, so that a
slow moment hits both."""
MIN_GAIN = 0.05
"""Share of a step's time that a change must save. Less may be noise, and the policy would swing."""
FIRST_RETRY, LAST_RETRY = 100, 1600
"""Steps after which the slower way is tried again: at first, and at most, after it has kept losing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step, and those of them in which the host only waited for the exchange."""

    seconds: float
    waited_s: float


@dataclass(kw_only=True, slots=True)
class _Rows:
    """Timings of steps with about as many rows, by whether they were split."""

    times: dict[bool, deque[StepTime]] = field(
        default_factory=lambda: {way: deque(maxlen=SAMPLES) for way in (False, True)}
    )
    split: bool = False
    trial: bool = False
    left: int = SAMPLES
    """Steps before a trial begins or ends."""
    pause: int = FIRST_RETRY

    @property
    def now(self) -> bool:
        return self.split != (self.trial and self.left % 2 == 0)

    def median(self, *, split: bool) -> float:
        return median(time.seconds for time in self.times[split])

    def may_pay(self) -> bool:
        """Return whether a split could save enough: at best it hides all the waiting."""
        waited = median(time.waited_s for time in self.times[False])
        return waited > MIN_GAIN * self.median(split=False)


class OverlapPolicy:
    """The policy of one engine.

    Args:
        mode: ``auto`` measures; ``on`` splits every step that can be split; ``off`` none.
        tokens_per_row: attended tokens that cost as much as the dense work of one row.
        waits_seen: whether the host's clock sees the link's waiting. Otherwise trials alone decide.
    """

    def __init__(self, mode: Mode, *, tokens_per_row: float = 0.0, waits_seen: bool = True) -> None:
        self._mode = mode
        self._tokens_per_row = tokens_per_row
        self._waits_seen = waits_seen
        self._by_rows: dict[int, _Rows] = {}

    @property
    def active(self) -> bool:
        """Whether any step may be split. Otherwise :meth:`cut` and :meth:`note` do nothing."""
        return self._mode != "off"

    @property
    def insists(self) -> bool:
        """Whether every step that can be split is split, even if that is slower."""
        return self._mode == "on"

    def cut(self, sequences: Sequence[tuple[int, int]]) -> int | None:
        """Return how many of ``sequences``, ``(rows, kv_len)`` each, make the first micro-batch; None: do not split."""
        if self._mode == "off" or len(sequences) < 2:
            return None
        if self._mode == "auto" and not self._rows_of(sequences).now:
            return None
        return balanced_cut([rows * (self._tokens_per_row + kv_len) for rows, kv_len in sequences])

    def note(self, sequences: Sequence[tuple[int, int]], time: StepTime, *, split: bool) -> None:
        """Learn from a step that :meth:`cut` decided on. Other steps may have been cut since."""
        if self._mode == "auto" and len(sequences) > 1:
            rows = self._rows_of(sequences)
            rows.times[split].append(time)
            rows.left -= 1
            if rows.left <= 0:
                self._turn(rows)

    def _turn(self, rows: _Rows) -> None:
        """End a trial and judge it, or begin one where a split may pay."""
        if rows.trial:
            _judge(rows)
        elif rows.split or not self._waits_seen or rows.may_pay():
            rows.trial, rows.left = True, 2 * SAMPLES
        else:
            rows.left = FIRST_RETRY

    def _rows_of(self, sequences: Sequence[tuple[int, int]]) -> _Rows:
        """Return the record of steps with as many rows, within a power of two: dense work and exchange grow alike."""
        return self._by_rows.setdefault(sum(rows for rows, _ in sequences).bit_length(), _Rows())


def _judge(rows: _Rows) -> None:
    rows.trial = False
    if rows.median(split=not rows.split) < (1 - MIN_GAIN) * rows.median(split=rows.split):
        rows.split, rows.pause = not rows.split, FIRST_RETRY
    else:
        rows.pause = min(2 * rows.pause, LAST_RETRY)
    rows.left = rows.pause


def balanced_cut(costs: Sequence[float]) -> int:
    """Return how many of the first ``costs`` to take so that both parts' sums differ least; at least one, and not all.

    >>> balanced_cut([1, 1, 1, 5, 2])
    3
    """
    total = sum(costs)
    sums = list(accumulate(costs))[:-1]
    return 1 + min(range(len(sums)), key=lambda at: abs(2 * sums[at] - total))
