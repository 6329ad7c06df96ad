"""Alerts as rules: for a Prometheus without an operator, and as the chart's template of a PrometheusRule.

Both come from :data:`observability.alerts.ALERTS`. In an expression `<series>` stands for the labels that pick a
release's series, which the chart knows and plain rules leave out, and `<name>` for a value of the chart below
metrics.prometheusRule, whose default plain rules have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

OWNER = "namespace, app_kubernetes_io_instance, job"
"""Labels that set servers apart under one Prometheus: of the chart's PodMonitor, and of a scrape of `serve`."""
SERIES = "<series>"
_SELECTOR = re.compile(r"\{<series>(,?)")
_VALUE = re.compile(r"<(\w+)>")
_TEMPLATE = re.compile(r"\{\{.*?\}\}")
_PLAIN_HEAD = (
    "# Written by helm/generate.py, never by hand. Alerts of expertmesh for a Prometheus without an operator.\n"
)
_CHART_HEAD = """\
{{- /* Written by helm/generate.py from helm/observability, never by hand. */ -}}
{{- if .Values.metrics.prometheusRule.enabled }}
{{- $series := include "expertmesh.series" (dict "root" $) }}
{{- $rule := .Values.metrics.prometheusRule }}
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {{- include "expertmesh.metadata" (dict "root" $ "role" "alerts" "labels" $rule.labels) | nindent 2 }}
spec:
"""
_CHART_TAIL = "{{- end }}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """``page`` is that of docs/runbooks. ``wait`` is how long the expression must hold."""

    name: str
    expr: str
    wait: str = ""
    severity: Literal["critical", "warning", "info"]
    summary: str
    description: str
    page: str


def series(name: str, labels: str = "") -> str:
    """
    >>> series("expert_seats", 'shard="1"')
    'expertmesh_expert_seats{<series>,shard="1"}'
    """
    return f"expertmesh_{name}{{{','.join(filter(None, (SERIES, labels)))}}}"


def most(name: str, by: str = "", labels: str = "") -> str:
    """The highest of a gauge, by server and ``by``: leaders have it, standbys 0 or nothing."""
    return f"max by ({_owner(by)}) ({series(name, labels)})"


def rate(name: str, window: str, by: str = "", labels: str = "") -> str:
    return f"sum by ({_owner(by)}) (rate({series(name, labels)}[{window}]))"


def growth(name: str, window: str, by: str = "", labels: str = "") -> str:
    return f"sum by ({_owner(by)}) (increase({series(name, labels)}[{window}]))"


def newly(name: str, minutes: int, by: str = "", labels: str = "") -> str:
    """As :func:`growth`. Of a series that is younger than the window all of it counts, also its first value, which
    `increase` does not see: series with a label begin with that."""
    now = series(name, labels)
    old = f"{now} offset {minutes}m"
    return f"sum by ({_owner(by)}) ((increase({now}[{minutes}m]) and {old}) or ({now} unless {old}))"


def _owner(by: str) -> str:
    return ", ".join(filter(None, (OWNER, by)))


NOT_ASLEEP = f"unless on ({OWNER}) {most('sleep_level')} > 0"
"""Silences what follows from a sleep that an operator ordered."""


def plain(alerts: Sequence[Alert], values: Mapping[str, Any]) -> str:
    """The rules as a file for Prometheus, with ``values`` of the chart in place."""

    def filled(text: str) -> str:
        return _VALUE.sub(lambda found: str(values[found[1]]), _SELECTOR.sub("{", text)).replace("{}", "")

    return _PLAIN_HEAD + _groups(alerts, filled)


def template(alerts: Sequence[Alert]) -> str:
    """The rules as the chart's template of a PrometheusRule."""

    def filled(text: str) -> str:
        kept = _TEMPLATE.sub(lambda found: f"{{{{ `{found[0]}` }}}}", text)
        selected = _SELECTOR.sub(lambda found: "{ {{- $series -}} " + found[1], kept)
        return _VALUE.sub(lambda found: f"{{{{ $rule.{found[1]} }}}}", selected)

    return _CHART_HEAD + _indented(_groups(alerts, filled)) + _CHART_TAIL


def _groups(alerts: Sequence[Alert], filled: Callable[[str], str]) -> str:
    lines = ["groups:", "  - name: expertmesh", "    rules:"]
    for alert in alerts:
        lines += [f"      {line}" for line in _rule(alert, filled)]
    return "\n".join(lines) + "\n"


def _rule(alert: Alert, filled: Callable[[str], str]) -> list[str]:
    """One rule as lines of YAML. Texts are blocks, in which nothing has to be quoted."""
    address = f"<runbooks>/{alert.page}.md#{alert.name.lower()}"
    annotations = {"summary": alert.summary, "description": alert.description, "runbook_url": address}
    return [
        f"- alert: {alert.name}",
        "  expr: |-",
        *(f"    {line}" for line in filled(alert.expr).splitlines()),
        *([f"  for: {alert.wait}"] if alert.wait else []),
        f"  labels: {{severity: {alert.severity}}}",
        "  annotations:",
        *(line for key, text in annotations.items() for line in (f"    {key}: >-", f"      {filled(text)}")),
    ]


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
