"""Decides when a process that ended is started again. Pure: it counts and computes, the caller waits."""

from __future__ import annotations

from collections.abc import Container

from services.errors import CheckpointError, ConfigError, FingerprintMismatch, StartupError
from services.runtime import AGAIN

FATAL_CODES = frozenset(error.exit_code for error in (StartupError, ConfigError, CheckpointError, FingerprintMismatch))
"""Exit codes of start-up errors that the next try would repeat. A taken port is not one: it may become free."""

MAX_AGAIN = 20


class RestartPolicy:
    """Exponential back-off, in seconds, for one process.

    A process that lived ``healthy_s``, or served that long where its supervisor counts so, clears the record. After
    ``max_failures`` shorter lives in a row it is given up, unless it is spared because others of its kind do its work.
    One that ended because of another process (``AGAIN``) has not failed; after :data:`MAX_AGAIN` short lives it is
    given up.
    """

    def __init__(
        self,
        *,
        first_delay_s: float = 0.25,
        max_delay_s: float = 10.0,
        healthy_s: float = 30.0,
        max_failures: int = 5,
        fatal: Container[int] = FATAL_CODES,
    ) -> None:
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self.healthy_s = healthy_s
        self._max_failures = max_failures
        self._fatal = fatal
        self._failures = 0
        self._again = 0

    @property
    def exhausted(self) -> bool:
        """Whether it ended too often in a row."""
        return self._failures >= self._max_failures

    def delay(self, code: int, lived_s: float, *, spared: bool = False, proven: bool = False) -> float | None:
        """Return the seconds to wait before the next start of a process that ended with ``code``; None to give up.

        ``proven``: it has worked with these settings before, so no exit code rules out another try.
        """
        if code in self._fatal and not proven:
            return None
        if code == AGAIN:
            self._again = 1 if lived_s >= self.healthy_s else self._again + 1
            if self._again > MAX_AGAIN:  # the cause does not pass
                return None
            return min(self._first_delay_s * 2.0 ** (self._again - 1), self._max_delay_s)
        self._failures = 1 if lived_s >= self.healthy_s else self._failures + 1
        if self.exhausted and not spared:
            return None
        return min(self._first_delay_s * 2.0 ** min(self._failures - 1, 30), self._max_delay_s)
