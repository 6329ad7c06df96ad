"""The gaps between arrivals, on a clock on which one arrival comes per unit of time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.errors import BadSetting


@dataclass(frozen=True, slots=True)
class Gaps:
    """Independent gaps with a mean of 1 and a gamma distribution. ``cv``: standard deviation over mean. 0: constant; 1:
    exponential, a Poisson process; 1/sqrt(k): Erlang of k stages; above 1: bursts."""

    cv: float

    @property
    def text(self) -> str:
        names = {0.0: "equal gaps", 1.0: "Poisson arrivals"}
        return names.get(self.cv, f"gamma gaps of cv {self.cv:.4g}")

    def draw(self, rng: random.Random) -> Iterator[float]:
        """Returns gaps without end. Those of a Poisson process are minus the logarithm of a uniform number, as in
        ExpertFlow (equation 6.3, whose factor 1/k before the sum of logarithms has to be 1/lambda)."""
        if self.cv == 0:
            while True:
                yield 1.0
        shape = self.cv**-2
        while True:
            yield -math.log(1.0 - rng.random()) if shape == 1 else rng.gammavariate(shape, 1 / shape)


def parse_gaps(text: str) -> Gaps:
    """Returns the gaps of a setting: ``constant``, ``poisson``, ``gamma:CV`` or ``erlang:K``.

    >>> parse_gaps("erlang:4")
    Gaps(cv=0.5)

    Raises:
        BadSetting: it is none of these.
    """
    kind, _, number = text.partition(":")
    hint = "Write constant, poisson, gamma:CV or erlang:K."
    try:
        value = float(number) if number else None
    except ValueError as error:
        raise BadSetting(f"{text!r} are no gaps.", hint=hint) from error
    match kind, value:
        case "constant", None:
            return Gaps(0.0)
        case "poisson", None:
            return Gaps(1.0)
        case "gamma", float() if 0 < value <= 100:
            return Gaps(value)
        case "erlang", float() if value >= 1 and value == int(value):
            return Gaps(value**-0.5)
    raise BadSetting(f"{text!r} are no gaps.", hint=hint)
