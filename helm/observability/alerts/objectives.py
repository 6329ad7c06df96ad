"""Alerts about objectives: how fast the error budget is spent, and goodput.

A short and a long window must agree, so that neither a spike nor a fault that has ended wakes anybody (Google's SRE
workbook, "Alerting on SLOs").
"""

from __future__ import annotations

from observability.rules import Alert, growth, rate

_ENOUGH = 20
"""Requests within the long window below which a share says nothing."""
_EACH = 'objective!="all"'


def _missed(window: str) -> str:
    """Share of requests that missed each objective."""
    part = rate("slo_requests_total", window, "objective", f'{_EACH},met="false"')
    return f"{part} / {rate('slo_requests_total', window, 'objective', _EACH)}"


def _burns(short: str, long: str, factor: float) -> str:
    return (
        f"(\n  {_missed(short)}\n) > {factor} * (1 - <slo>)\n"
        f"and\n(\n  {_missed(long)}\n) > {factor} * (1 - <slo>)\n"
        f"and\n{growth('slo_requests_total', long, 'objective', _EACH)} >= {_ENOUGH}"
    )


_ALL, _MET = 'objective="all"', 'objective="all",met="true"'
_GOOD = f"({rate('slo_requests_total', '30m', labels=_MET)} or 0 * {rate('slo_requests_total', '30m', labels=_ALL)})"

ALERTS = (
    Alert(
        name="ExpertmeshSloBurnsFast",
        expr=_burns("5m", "1h", 14.4),
        wait="2m",
        severity="critical",
        summary="Requests of {{ $labels.job }} miss their objective {{ $labels.objective }} over 14.4 times as often "
        "as allowed.",
        description="{{ $value | humanizePercentage }} of requests missed it within 5 minutes, and the hour before "
        "was as bad: a month's error budget would last two days.",
        page="slo",
    ),
    Alert(
        name="ExpertmeshSloBurnsSlowly",
        expr=_burns("30m", "6h", 6),
        wait="15m",
        severity="warning",
        summary="Requests of {{ $labels.job }} miss their objective {{ $labels.objective }} over 6 times as often as "
        "allowed.",
        description="{{ $value | humanizePercentage }} of requests missed it within 30 minutes, and the 6 hours "
        "before were as bad: a month's error budget would last five days.",
        page="slo",
    ),
    Alert(
        name="ExpertmeshGoodputLow",
        expr=f"{_GOOD} / {rate('slo_requests_total', '30m', labels=_ALL)} < <goodput>\n"
        f"and\n{growth('slo_requests_total', '30m', labels=_ALL)} >= {_ENOUGH}",
        wait="10m",
        severity="warning",
        summary="Only {{ $value | humanizePercentage }} of the requests of {{ $labels.job }} are good.",
        description="Good requests end well, with their first token and their tokens in time. Within 30 minutes "
        "there were fewer of them than metrics.prometheusRule.goodput asks for.",
        page="slo",
    ),
)
