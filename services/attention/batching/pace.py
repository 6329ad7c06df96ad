"""How many rows of prompts a step may have beside decodes: as many as keep the time between two tokens of a stream
within a multiple of what it is without prompts. Pure Python; learns from the steps that ran.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FEWEST_ROWS = 256
"""Rows that a step with prompts may always have: with fewer, prompts would take several times longer in all."""
LEARNT_FROM = 256
"""Fewest rows of prompts from which the time of one is learnt. Fewer disappear in the noise."""
SAMPLES = 15
"""Steps by which a time is judged. A slow moment of the machine hits some of them, so the lower quartile is taken."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds that were measured last."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @property
    def usual(self) -> float:
        """The lower quartile; of nothing: 0."""
        return sorted(self.seen)[len(self.seen) // 4] if self.seen else 0.0


class Pace:
    """The pace of one engine's steps.

    Args:
        stretch: how many times as long as without prompts a step may take, 1 or more.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decodes: dict[int, _Times] = {}
        self._prompt_row = _Times()

    def rows(self, decodes: int) -> int | None:
        """Return how many rows of prompts may join ``decodes`` decodes; None: any number, for lack of experience or
        because nobody waits for a token."""
        if not decodes or not (row_s := self._prompt_row.usual) or not (alone_s := self._alone_s(decodes)):
            return None
        return max(FEWEST_ROWS, round((self._stretch - 1) * alone_s / row_s))

    def note(self, decodes: int, prompt_rows: int, seconds: float) -> None:
        """Learn from a step of so many rows."""
        if not prompt_rows:
            self._decodes.setdefault(decodes.bit_length(), _Times()).seen.append(seconds)
        elif prompt_rows >= LEARNT_FROM:
            rest_s = seconds - (self._alone_s(decodes) if decodes else 0.0)
            self._prompt_row.seen.append(max(rest_s, 0.0) / prompt_rows)

    def _alone_s(self, decodes: int) -> float:
        """Return the seconds of a step of ``decodes`` decodes, or of the largest smaller batch that was seen."""
        sizes = [size for size in self._decodes if size <= decodes.bit_length()]
        return self._decodes[max(sizes)].usual if sizes else 0.0
