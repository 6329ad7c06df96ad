"""A load that clients of several projects can send: what it is, and the figures of one that has been sent.

A load goes out through :func:`send`, or through another client (``loadgen.other_clients``); :class:`Figures` come back
from both. Definitions are those on which clients agree: latencies count from the moment a request is sent, connecting
included; TPOT is a request's time after its first token over its other tokens; ITL are the single gaps between the
chunks of all requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadgen.drive import Report, drive
from loadgen.plan import Plan
from loadgen.results import Latency, Run
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import Schedule, arrivals, at_once
from loadgen.workload.bodies import Bodies
from loadgen.workload.synthetic import Singles
from loadgen.workload.words import Lengths, Prompts


class Arrivals(StrEnum):
    """How requests come at a rate: a Poisson process, or one after the other at equal intervals."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """``requests`` to the server at ``url``, greedy, each as long as it may be, no two prompts alike. ``rate``:
    arrivals a second, None for all at once. ``tokenizer`` is a folder or a name on a hub, for clients that make prompts
    of text."""

    url: str
    model: str
    tokenizer: str
    rate: float | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    arrivals: Arrivals = Arrivals.POISSON
    seed: int = 0

    def plan(self) -> Plan:
        """Returns the load for the clients of this package."""
        common = {"temperature": 0, "ignore_eos": True}
        source = Singles(
            prompts=Prompts(ids=True),
            prompt_tokens=Lengths(self.prompt_tokens, self.prompt_tokens),
            output_tokens=Lengths(self.output_tokens, self.output_tokens),
            seed=self.seed,
        )
        bodies = Bodies(endpoint="completions", model=self.model, common=common)
        return Plan(url=self.url, bodies=bodies, source=source, load=self._schedule())

    def _schedule(self) -> Schedule:
        if self.rate is None:
            return at_once(self.requests)
        gaps = Gaps(0.0 if self.arrivals is Arrivals.CONSTANT else 1.0)
        return arrivals(flat(self.rate), gaps, seed=self.seed, requests=self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one client measured. Latencies are in ms; those that a client does not report are None. ``lag_p99_ms``: how
    late requests were sent. ``error`` is that of the first request that failed."""

    completed: int
    failed: int
    requests_s: float
    output_tokens_s: float
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    lag_p99_ms: float | None = None
    error: str | None = None


def send(load: Load, report: Report | None = None) -> Figures:
    """Send ``load``, each request at its time whether earlier ones have ended or not."""
    return figures_of(drive(load.plan(), report=report).run)


def figures_of(run: Run) -> Figures:
    """Returns the figures of ``run``. Requests that failed count as such and nowhere else."""
    ttft, tpot, itl = (run.latency.get(metric) for metric in ("service_ttft", "tpot", "itl"))
    first = min(run.errors, key=lambda error: error.first_at_s, default=None)
    return Figures(
        completed=run.counts.ok,
        failed=run.counts.scheduled - run.counts.ok,
        requests_s=run.rates.requests,
        output_tokens_s=run.rates.output_tokens,
        ttft_p50_ms=_p50(ttft),
        ttft_p99_ms=_p99(ttft),
        tpot_p50_ms=_p50(tpot),
        tpot_p99_ms=_p99(tpot),
        itl_p50_ms=_p50(itl),
        itl_p99_ms=_p99(itl),
        lag_p99_ms=run.validity.lag_p99_ms,
        error=f"{first.kind}: {first.example}" if first else None,
    )


def _p50(found: Latency | None) -> float | None:
    return found.p50_ms if found else None


def _p99(found: Latency | None) -> float | None:
    return found.p99_ms if found else None
