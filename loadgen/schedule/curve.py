"""A rate over time, in pieces in each of which it is a straight line; and the moments of arrivals that follow it.

With L(t) the number of arrivals expected until t, an arrival whose number is u on the clock of a process of rate 1 is
at the t with L(t) = u. So any renewal process follows any curve, and a Poisson process stays one (inhomogeneous).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.errors import BadSetting

_DAY_PIECES = 288


@dataclass(frozen=True, slots=True)
class Piece:
    """``seconds`` in which the rate goes from ``begin`` to ``end`` arrivals a second. ``seconds`` may be infinite where
    both are equal."""

    seconds: float
    begin: float
    end: float

    @property
    def arrivals(self) -> float:
        return self.seconds * (self.begin + self.end) / 2 if self.begin + self.end else 0.0

    def after(self, arrivals: float) -> float:
        """Returns the seconds from its begin until ``arrivals`` are expected, at most all of them."""
        slope = (self.end - self.begin) / self.seconds
        root = math.sqrt(max(0.0, self.begin**2 + 2 * slope * arrivals))
        return min(self.seconds, 2 * arrivals / (self.begin + root)) if self.begin + root else self.seconds


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Pieces one after the other, then nothing."""

    pieces: Sequence[Piece]
    text: str
    _until: list[float] = field(init=False)
    _begins: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_until", list(itertools.accumulate(piece.arrivals for piece in self.pieces)))
        begins = itertools.accumulate((piece.seconds for piece in self.pieces), initial=0.0)
        object.__setattr__(self, "_begins", list(begins))

    @property
    def seconds(self) -> float:
        return self._begins[-1]

    @property
    def arrivals(self) -> float:
        """Expected in all, possibly infinite."""
        return self._until[-1]

    def at(self, number: float) -> float:
        """Returns when ``number`` arrivals are expected; infinite if they never are."""
        place = bisect.bisect_left(self._until, number)
        if place == len(self.pieces):
            return math.inf
        before = self._until[place - 1] if place else 0.0
        return self._begins[place] + self.pieces[place].after(number - before)

    def piece_at(self, moment: float) -> int:
        """Returns the number of the piece that ``moment`` is in."""
        return min(len(self.pieces) - 1, bisect.bisect_right(self._begins, moment) - 1)


def flat(rate: float) -> RateCurve:
    return RateCurve([Piece(math.inf, rate, rate)], f"{rate:g} a second")


def diurnal(mean: float, period_s: float, peak: float) -> RateCurve:
    """A day of ``period_s``: lowest at its begin, ``peak`` times the mean (1 to 2) at its middle."""
    if not 1 <= peak <= 2:
        raise BadSetting(f"A day's peak is {peak:g} times its mean; expected 1 to 2.")

    def level(part: float) -> float:
        return mean * (1 - (peak - 1) * math.cos(2 * math.pi * part))

    edges = [number / _DAY_PIECES for number in range(_DAY_PIECES + 1)]
    pieces = [Piece(period_s / _DAY_PIECES, level(a), level(b)) for a, b in itertools.pairwise(edges)]
    return RateCurve(pieces, f"a day of {period_s:g} s with {mean:g} a second and a peak of {peak:g} times that")


def parse_curve(text: str) -> RateCurve:
    """Returns the curve of a setting.

    ``100`` for ever; ``10:30,50:30`` 10 a second for 30 s, then 50 for 30 s; ``10..100:60`` from 10 to 100 within 60 s;
    ``day:20:3600:1.8`` a day of an hour with 20 a second and a peak of 1.8 times that.

    >>> parse_curve("10:30,10..20:10").arrivals
    450.0

    Raises:
        BadSetting: it is none of these.
    """
    hint = "Write 100, or 10:30,50:30 (rate:seconds), or 10..100:60 (ramp), or day:MEAN:SECONDS:PEAK."
    try:
        if text.startswith("day:"):
            mean, period, peak = map(float, text.split(":")[1:])
            return _checked(diurnal(mean, period, peak), text, hint)
        if ":" not in text:
            return _checked(flat(float(text)), text, hint)
        pieces = [_piece(part) for part in text.split(",")]
    except ValueError as error:
        raise BadSetting(f"{text!r} is no rate.", hint=hint) from error
    words = ", then ".join(
        f"{p.begin:g} a second for {p.seconds:g} s"
        if p.begin == p.end
        else f"{p.begin:g} to {p.end:g} in {p.seconds:g} s"
        for p in pieces
    )
    return _checked(RateCurve(pieces, words), text, hint)


def _piece(text: str) -> Piece:
    rates, _, seconds = text.partition(":")
    begin, _, end = rates.partition("..")
    return Piece(float(seconds), float(begin), float(end or begin))


def _checked(curve: RateCurve, text: str, hint: str) -> RateCurve:
    numbers = [number for piece in curve.pieces for number in (piece.seconds, piece.begin, piece.end)]
    if any(math.isnan(number) or number < 0 for number in numbers) or any(not p.seconds > 0 for p in curve.pieces):
        raise BadSetting(f"{text!r} has a rate or a time that is none.", hint=hint)
    if not all(math.isfinite(rate) for piece in curve.pieces for rate in (piece.begin, piece.end)):
        raise BadSetting(f"{text!r} has no finite rate.", hint="--rate inf sends all at once.")
    if not curve.arrivals > 0:
        raise BadSetting(f"At {text!r} nothing ever arrives.", hint=hint)
    return curve
