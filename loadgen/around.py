"""What a run has around it besides the load: events, what Prometheus knew, and on which machine it was."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadgen.environment import environment
from loadgen.errors import BadSetting
from loadgen.events.apart import Apart
from loadgen.events.follow import check
from loadgen.events.host import Host
from loadgen.events.kube import KubeHost
from loadgen.events.local import LocalHost
from loadgen.events.plan import FORMS, Planned, planned
from loadgen.prometheus import Prometheus, query_of
from loadgen.results import Run

PROMETHEUS_ENV = "EXPERTMESH_LOAD_PROMETHEUS"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :class:`Around` to ``parser``."""
    group = parser.add_argument_group("events, and what Prometheus knows")
    group.add_argument(
        "--event",
        action="append",
        default=[],
        metavar="EVENT",
        help=f"do something to the server during the load, as often as given: {', '.join(FORMS)} "
        "(AT: 30, 30s or 1.5m after the beginning; NAME: a process of `expertmesh serve` on this machine such as "
        "experts-1, or with --release a role, shard group, pod or workload)",
    )
    group.add_argument("--release", help="the release of the chart that events are about, reached by kubectl")
    group.add_argument("--kube-namespace", metavar="NAME", help="its namespace (default: that of the kubeconfig)")
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    group.add_argument(
        "--prometheus",
        metavar="URL",
        help="put the server's replicas, seats, queue and errors of the time of the run into the results "
        f"(default: {PROMETHEUS_ENV})",
    )
    group.add_argument(
        "--matchers",
        default="",
        metavar="MATCHERS",
        help='labels that choose the server there, such as namespace="mesh"',
    )
    group.add_argument(
        "--query", action="append", default=[], metavar="NAME=PROMQL", help="another series, as often as given"
    )
    group.add_argument("--gpus", type=float, metavar="N", help="GPUs of the server, for GPU-hours and cost")
    group.add_argument("--price-per-gpu-hour", type=float, metavar="PRICE", help="for the cost of a million tokens")


@dataclass(kw_only=True, slots=True)
class Around:
    """``events`` happen to ``host``. After :meth:`following` was left, :meth:`complete` adds what came of them."""

    events: Sequence[Planned] = ()
    host: Host
    prometheus: Prometheus | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    _followed: Apart | None = None

    @classmethod
    def from_args(cls, given: argparse.Namespace, url: str) -> Around:
        """Returns what the options ``given`` ask for, about the server at ``url``.

        Raises:
            BadSetting: an option is malformed.
        """
        server = given.prometheus or os.environ.get(PROMETHEUS_ENV)
        if (given.query or given.matchers) and not server:
            raise BadSetting("--query and --matchers need a Prometheus.", hint="Give --prometheus URL.")
        for name in ("gpus", "price_per_gpu_hour"):
            value = getattr(given, name)
            if value is not None and not 0 < value < float("inf"):
                raise BadSetting(f"--{name.replace('_', '-')} is not above 0.")
        queries = [query_of(text) for text in given.query]
        return cls(
            events=[planned(text) for text in given.event],
            host=_host(given, url),
            prometheus=Prometheus(server, matchers=given.matchers, more=queries) if server else None,
            settings={name: getattr(given, name) for name in ("gpus", "price_per_gpu_hour") if getattr(given, name)},
        )

    def check(self, last_s: float | None = None) -> None:
        """Look before the load begins whether events have their targets and Prometheus answers. ``last_s``: when the
        last request is due, where that is known.

        Raises:
            BadSetting: an event is due after the load.
            EventImpossible: an event cannot happen.
            ServerUnusable: Prometheus does not answer.
        """
        for event in self.events:
            if last_s is not None and event.at_s > last_s:
                late = f"{event.action} {event.target} at {event.at_s:g} s"
                raise BadSetting(f"--event: {late} comes after the load, which takes {last_s:g} s.")
        asyncio.run(check(self.events, self.host))
        if self.prometheus is not None:
            asyncio.run(self.prometheus.check())

    def following(self) -> Apart:
        """Returns the context of the load, in which events happen once its ``begin`` was called."""
        self._followed = Apart(self.events, self.host)
        return self._followed

    def complete(self, run: Run) -> Run:
        """Returns ``run`` with what happened around it."""
        series = []
        if self.prometheus is not None:
            series = asyncio.run(self.prometheus.series(run.began_at, run.duration_s))
        return msgspec.structs.replace(
            run,
            events=self._followed.events if self._followed else [],
            series=series,
            environment=environment(),
            settings=run.settings | dict(self.settings),
        )


def _host(given: argparse.Namespace, url: str) -> Host:
    if given.release is None:
        if given.kube_namespace or given.context:
            raise BadSetting("--kube-namespace and --context are about a release.", hint="Give --release NAME.")
        return LocalHost(url)
    chosen = [("--context", given.context), ("--namespace", given.kube_namespace)]
    words = [word for option, value in chosen if value for word in (option, value)]
    return KubeHost(given.release, ["kubectl", *words])
