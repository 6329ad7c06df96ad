"""Alerts about work that fails or is done twice."""

from __future__ import annotations

from observability.rules import Alert, growth, most, newly, rate


def _new(name: str, labels: str) -> str:
    """Whether a counter with the label ``reason`` grew within 15 minutes."""
    return f"{newly(name, 15, 'reason', labels)} > 0"


_UNEXPECTED = 'reason!="experts"'
_PEERS = 'reason=~"secret_mismatch|weights_mismatch|fingerprint_mismatch"'

ALERTS = (
    Alert(
        name="ExpertmeshStepsRepeated",
        expr=f"{rate('repeated_steps_total', '10m')} / {rate('engine_steps_total', '10m')} > 0.01",
        wait="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of the steps of {{ $labels.job }} run again, since expert workers "
        "are lost or late.",
        description="Each such step delays all sequences of its batch.",
        page="steps",
    ),
    Alert(
        name="ExpertmeshStepsFail",
        expr=_new("step_failures_total", _UNEXPECTED),
        severity="warning",
        summary="Steps of {{ $labels.job }} fail: {{ $labels.reason }}.",
        description="Within 15 minutes a step raised an exception (error) or gave values that are no numbers "
        "(not_finite).",
        page="steps",
    ),
    Alert(
        name="ExpertmeshRequestsGivenUp",
        expr=f"{growth('given_up_attempts_total', '10m')} > 0",
        wait="1m",
        severity="warning",
        summary="Attention workers of {{ $labels.job }} gave up attempts, since no replica of some experts could be "
        "reached.",
        description="{{ $value | humanize }} within 10 minutes. The requests are tried elsewhere or later, at most "
        "--max-attempts times.",
        page="lost-requests",
    ),
    Alert(
        name="ExpertmeshDeadLetters",
        expr=f"{most('dead_letters')} > 0",
        wait="1m",
        severity="warning",
        summary="{{ $value | humanize }} requests of {{ $labels.job }} are not tried again.",
        description="They lost too many workers, or killed them. `expertmesh queue list` shows them.",
        page="lost-requests",
    ),
    Alert(
        name="ExpertmeshPeersRefused",
        expr=f"{_new('refused_peers_total', _PEERS)}\nor\n{_new('experts_refused_peers_total', _PEERS)}",
        severity="critical",
        summary="Workers of {{ $labels.job }} refused a peer: {{ $labels.reason }}.",
        description="Somebody without the fabric's secret, or with other weights, tried to join within the last 15 "
        "minutes.",
        page="refused-peers",
    ),
)
