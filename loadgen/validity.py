"""Whether a run's figures may be used: requests have to be sent when they are due."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.errors import BadSetting
from loadgen.results import Latency, Validity

SHARE_OF_GAP = 0.05
_FEW = 10
"""Values above a percentile that make it more than chance."""


@dataclass(frozen=True, slots=True)
class LagLimit:
    """What the 99th percentile of the send lag may be: a share of the mean gap, or a time."""

    share: float | None = SHARE_OF_GAP
    seconds: float | None = None

    def of(self, mean_gap_s: float | None) -> float | None:
        """Returns seconds; None if there is no limit, for nothing was due at a time."""
        if self.seconds is not None or mean_gap_s is None or self.share is None:
            return self.seconds
        return self.share * mean_gap_s


def parse_lag_limit(text: str) -> LagLimit:
    """Returns the limit of a setting: ``5%`` of the mean gap, or ``2ms``.

    Raises:
        BadSetting: it is neither.
    """
    try:
        if text.endswith("%"):
            return LagLimit(float(text[:-1]) / 100)
        if text.endswith("ms"):
            return LagLimit(None, float(text[:-2]) / 1e3)
    except ValueError:
        pass
    raise BadSetting(f"{text!r} is no limit.", hint="Write 5% (of the mean gap) or 2ms.")


def judged(lag: Latency | None, limit_s: float | None, requests: int, answered: int) -> Validity:
    """Returns the judgement on a run of ``requests``, of which ``answered`` got an answer."""
    lag_ms = lag.p99_ms if lag else 0.0
    reasons, warnings = [], []
    if limit_s is not None and lag_ms > limit_s * 1e3:
        late = f"requests were sent {lag_ms:.3g} ms late (p99), more than {limit_s * 1e3:.3g} ms"
        reasons.append(
            f"{late}: this machine is too slow or too busy; lower the rate, or use --realtime or more --processes"
        )
    if not requests:
        reasons.append("nothing was sent")
    elif not answered:
        warnings.append("no request was answered")
    rare = [name for name, tail in (("p99.9", 1e-3), ("p99", 1e-2)) if answered and answered * tail < _FEW]
    if rare:
        warnings.append(f"{answered} answers are few for {' and '.join(rare)}: fewer than {_FEW} lie above")
    return Validity(
        valid=not reasons,
        lag_p99_ms=lag_ms,
        lag_limit_ms=None if limit_s is None else limit_s * 1e3,
        reasons=reasons,
        warnings=warnings,
    )
