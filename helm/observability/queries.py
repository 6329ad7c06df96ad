"""The PromQL of panels. In: names of series without prefix. Out: expressions that the dashboards' variables narrow.

The variables match what either scrape adds: the chart's PodMonitor gives series a namespace, a release and a job,
the page of `expertmesh serve` a job alone. Their value "All" is `.*`, which matches a label that is not there, too.
"""

from __future__ import annotations

SELECTOR = 'namespace=~"$namespace",app_kubernetes_io_instance=~"$release",job=~"$job"'
WINDOW = "$__rate_interval"
"""Grafana's own: at least four scrapes long, whatever the zoom."""
WORKER = "pod, role, exported_instance"
"""Labels that set workers apart: of pods, and of processes that share a page."""
WORKER_LEGEND = "{{pod}} {{role}} {{exported_instance}}"


def series(name: str, labels: str = "") -> str:
    """
    >>> series("workers", 'shard="1"').replace(SELECTOR, "...")
    'expertmesh_workers{...,shard="1"}'
    """
    return f"expertmesh_{name}{{{','.join(filter(None, (SELECTOR, labels)))}}}"


def most(name: str, by: str = "", labels: str = "") -> str:
    """The highest of each group: of gauges that the leading scheduler alone sets, and standbys have at 0 or not."""
    return f"max{_by(by)} ({series(name, labels)})"


def total(name: str, by: str = "", labels: str = "") -> str:
    """The sum of gauges over workers."""
    return f"sum{_by(by)} ({series(name, labels)})"


def rate(name: str, by: str = "", labels: str = "", window: str = WINDOW) -> str:
    """Increase of a counter by second, over all processes that have it."""
    return f"sum{_by(by)} (rate({series(name, labels)}[{window}]))"


def newly(name: str, by: str, minutes: int = 10) -> str:
    """By how much a counter grew within ``minutes``. Of a series that is younger all of it counts, also its first
    value, which `increase` does not see: series with a label, and those of rare events, begin with that."""
    now = series(name)
    old = f"{now} offset {minutes}m"
    return f"sum by ({by}) ((increase({now}[{minutes}m]) and {old}) or ({now} unless {old}))"


def share(part: str, whole: str) -> str:
    """NaN, and so a gap, where there is nothing of the whole."""
    return f"{part} / {whole}"


def missed(by: str = "", labels: str = "", window: str = WINDOW) -> str:
    """Share of requests that missed a target, 0 where none did."""
    every = rate("slo_requests_total", by, labels, window)
    met = rate("slo_requests_total", by, ",".join(filter(None, (labels, 'met="true"'))), window)
    return f"1 - ({met} or 0 * {every}) / {every}"


def quantile(part: float, name: str, by: str = "", labels: str = "") -> str:
    """Of a histogram's buckets summed over processes: quantiles themselves cannot be averaged."""
    buckets = rate(f"{name}_bucket", ", ".join(filter(None, ("le", by))), labels)
    return f"histogram_quantile({part}, {buckets})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
