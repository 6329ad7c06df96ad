"""The alerts, by what they are about."""

from __future__ import annotations

from observability.alerts import capacity, faults, objectives, parts
from observability.rules import Alert

ALERTS: tuple[Alert, ...] = (*objectives.ALERTS, *capacity.ALERTS, *parts.ALERTS, *faults.ALERTS)
