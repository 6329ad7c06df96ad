"""How many rows of prompts a step may have beside decodes: as many as keep the time between two tokens of a stream
within a multiple of what it is without prompts. Pure Python; learns from the steps that ran.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MIN_ROWS = 512
"""Rows that a step with prompts may always have. Such a step reads most experts, however few rows it has: beside few
streams it takes longer than the bound, and with fewer rows prompts would take several times as long in all."""
LEARNT_FROM = 256
"""The least rows of prompts from which the time of one is learnt. Fewer disappear in the noise."""
SAMPLES = 7
"""Steps that are remembered. A decode step is judged by the lower quartile, for steps are slow for many reasons; a row
of a prompt by the slowest but one, since it costs more the further the prompt has come."""
MARGIN = 0.9
"""What is aimed at, as a share of the bound: steps are not all alike."""
DEARER = 2.0
"""A row of a prompt beside decodes costs so many times as much as in a step of prompts alone, until it was measured:
such steps are smaller."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds that were measured last."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @property
    def usual(self) -> float:
        """The lower quartile; of nothing: 0."""
        return sorted(self.seen)[len(self.seen) // 4] if self.seen else 0.0

    @property
    def slow(self) -> float:
        """The slowest but one, which may have been disturbed; of fewer than three the slowest, of nothing: 0."""
        return sorted(self.seen)[-2 if len(self.seen) > 2 else -1] if self.seen else 0.0


class Pace:
    """The pace of one engine's steps.

    Args:
        stretch: how many times as long as without prompts a step may take, more than 1.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = max(1.0, MARGIN * stretch)
        self._decodes: dict[int, _Times] = {}
        self._beside, self._by_itself = _Times(), _Times()
        """Seconds for a row of a prompt in steps with decodes, and in others, which are larger."""

    def rows(self, decodes: int) -> int | None:
        """Return how many rows of prompts may join ``decodes`` decodes; None: any number, for lack of experience or
        because nobody waits for a token."""
        row_s = self._beside.slow or DEARER * self._by_itself.usual
        alone_s = self._alone_s(decodes)
        if not decodes or not row_s or not alone_s:
            return None
        return max(MIN_ROWS, round((self._stretch - 1) * alone_s / row_s))

    def note(self, decodes: int, prompt_rows: int, seconds: float) -> None:
        """Learn from a step of so many rows."""
        if not prompt_rows:
            self._decodes.setdefault(decodes.bit_length(), _Times()).seen.append(seconds)
        elif prompt_rows >= LEARNT_FROM:
            times, alone_s = (self._beside, self._alone_s(decodes)) if decodes else (self._by_itself, 0.0)
            times.seen.append(max(seconds - alone_s, 0.0) / prompt_rows)

    def warmed_up(self) -> None:
        """Forget dummy prompts, whose kernels had to be loaded. Dummy decodes are many enough to be judged by."""
        self._beside.seen.clear()
        self._by_itself.seen.clear()

    def _alone_s(self, decodes: int) -> float:
        """Return the seconds of a step of ``decodes`` decodes, or of the largest smaller batch that was seen."""
        sizes = [size for size in self._decodes if size <= decodes.bit_length()]
        return self._decodes[max(sizes)].usual if sizes else 0.0
