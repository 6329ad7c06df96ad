"""What a client saw of one request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.results import Outcome, RequestRecord, WrongAnswer
from loadgen.workload.conversation import Tenant


@dataclass(kw_only=True, slots=True)
class Seen:
    """Times in seconds after the schedule began. ``sent``: when its first try was. ``lag_s``: how long after
    ``scheduled`` the client turned to it. ``refusals``: moment, status, and whether it said how long to wait."""

    number: int
    scheduled: float
    lag_s: float
    sent: float
    outcome: Outcome
    first_token: float | None = None
    ended: float = 0.0
    status: int = 0
    tries: int = 1
    refusals: list[tuple[float, int, bool]] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    gaps: Sequence[float] = field(default_factory=lambda: array("d"))
    tenant: Tenant | None = None
    name: str | None = None
    request_id: str | None = None
    error: tuple[str, str] | None = None
    """Its kind, and what it said."""
    checked: bool = False
    wrong: WrongAnswer | None = None

    @property
    def ttft_s(self) -> float | None:
        """From the time at which it was due."""
        return None if self.first_token is None else self.first_token - self.scheduled

    @property
    def e2e_s(self) -> float:
        """From the time at which it was due."""
        return self.ended - self.scheduled

    @property
    def tpot_s(self) -> float | None:
        """None where there is no token after the first."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return sum(self.gaps) / (self.output_tokens - 1)

    def record(self) -> RequestRecord:
        return RequestRecord(
            number=self.number,
            scheduled_s=round(self.scheduled, 6),
            outcome=self.outcome,
            sent_s=round(self.sent, 6),
            first_token_s=None if self.first_token is None else round(self.first_token, 6),
            ended_s=round(self.ended, 6),
            tries=self.tries,
            status=self.status,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            tenant=self.tenant.name if self.tenant else None,
            priority=self.tenant.priority if self.tenant else None,
            name=self.name,
            request_id=self.request_id,
            error=f"{self.error[0]}: {self.error[1]}" if self.error else None,
        )
