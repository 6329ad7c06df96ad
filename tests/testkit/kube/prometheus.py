"""The cluster's Prometheus, asked from this machine."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from testkit.kube.cluster import Cluster

ADDRESS = "http://prometheus.monitoring.svc.cluster.local:9090"
"""Address of Prometheus inside the cluster."""
Line = list[tuple[float, float]]
"""Unix time and value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prometheus:
    """``url`` is where this machine reaches it."""

    url: str

    @classmethod
    def of(cls, cluster: Cluster) -> Prometheus:
        service = cluster.get("monitoring", "service", "prometheus")
        return cls(url=f"http://{service['spec']['clusterIP']}:9090")

    def value(self, query: str) -> float | None:
        """Value of the one series that ``query`` finds now; None where it finds none."""
        result = self._ask("query", query=query)
        return float(result[0]["value"][1]) if result else None

    def lines(self, query: str, began: float, ended: float, step_s: float = 1.0) -> dict[str, Line]:
        """Lines by the values of the series' labels, in the order of the labels."""
        found = self._ask("query_range", query=query, start=str(began), end=str(ended), step=str(step_s))
        return {
            " ".join(value for _, value in sorted(series["metric"].items()) if value): [
                (float(at), float(value)) for at, value in series["values"]
            ]
            for series in found
        }

    def _ask(self, path: str, **query: str) -> list[dict[str, object]]:
        response = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=30).raise_for_status()
        found: list[dict[str, object]] = response.json()["data"]["result"]
        return found
