"""How clients behave: what they send again, how long they wait, and which of them hang up."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadgen.client import StreamResult

TRY_AGAIN = (429, 503)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manners:
    """``retries``: how often a request is sent again that was refused with 429 or 503, or, with ``keyed``, whose
    connection broke. A client waits as long as Retry-After says, at most ``most_wait_s``, or else ``backoff_s``, twice
    as long each time. ``keyed``: an Idempotency-Key goes with each request, the same in all of its tries.
    ``disconnect_share`` of the requests hang up while the answer comes."""

    retries: int = 0
    backoff_s: float = 0.5
    most_wait_s: float = 60.0
    keyed: bool = False
    disconnect_share: float = 0.0
    seed: int = 0

    def pause_s(self, result: StreamResult, tries: int, *, broken: bool) -> float | None:
        """Returns how long to wait until the request is sent again after ``tries``; None: it is not."""
        again = (self.keyed and result.status in (0, 200)) if broken else result.status in TRY_AGAIN
        if not again or tries > self.retries:
            return None
        asked = result.retry_after
        return min(self.most_wait_s, self.backoff_s * 2 ** (tries - 1) if asked is None else asked)

    def leaves_after(self, number: int, turn: int, tokens: int | None) -> int | None:
        """Returns after how many chunks this request hangs up: 0 is when the answer begins; None: it does not."""
        if not self.disconnect_share:
            return None
        rng = random.Random(f"{self.seed} hangs up {number} {turn}")
        if rng.random() >= self.disconnect_share:
            return None
        return rng.randrange(max(1, tokens or 16))
