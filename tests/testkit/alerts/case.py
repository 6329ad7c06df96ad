"""What shows that an alert fires, and that it stays quiet: series over time, with the labels that a scrape adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CHART = {
    "namespace": "there",
    "app_kubernetes_io_instance": "mesh",
    "job": "there/mesh-expertmesh-roles",
    "instance": "10.0.0.1:9000",
    "pod": "mesh-0",
}
"""Labels that the chart's PodMonitor gives to series of the release ``mesh`` in ``there``."""
SERVE = {"job": "expertmesh", "instance": "127.0.0.1:8000"}
"""Labels that a scrape of `expertmesh serve` gives."""
OWNER = ("namespace", "app_kubernetes_io_instance", "job")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series: its name without the prefix, labels of its own, and values by minute in promtool's notation."""

    name: str
    values: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def series(self, scrape: Mapping[str, str]) -> dict[str, str]:
        """As promtool reads it. A label of its own beats the scrape's, so that one case may have several pods."""
        name = self.name if self.name == "up" else f"expertmesh_{self.name}"
        return {"series": name + labelled({**scrape, **self.labels}), "values": self.values}


def line(name: str, values: str, **labels: str) -> Line:
    return Line(name=name, values=values, labels=labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Of one alert.

    Attributes:
        fires: each is enough to make it fire at ``at`` minutes.
        quiet: none is.
        labels: what the alert that fires has beyond the labels that it ``keeps`` of the scrape.
        keeps: those that set servers apart (owner), the pod as well, all, or those that its own selector names.
    """

    alert: str
    at: int
    fires: tuple[tuple[Line, ...], ...]
    quiet: tuple[tuple[Line, ...], ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    keeps: Literal["owner", "pod", "all", "selector"] = "owner"

    def firing(self, scrape: Mapping[str, str], severity: str, *, chart: bool) -> str:
        """The series by which Prometheus says that the alert fires."""
        kept = {
            "owner": OWNER,
            "pod": (*OWNER, "pod"),
            "all": tuple(scrape),
            "selector": OWNER[:2] if chart else (),
        }[self.keeps]
        found = {name: scrape[name] for name in kept if name in scrape}
        named = {"alertname": self.alert, "alertstate": "firing", "severity": severity}
        return "ALERTS" + labelled({**found, **self.labels, **named})


def labelled(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items() if value) + "}"
