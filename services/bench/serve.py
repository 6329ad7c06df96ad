"""`bench serve`: a server under the load of expertmesh-load, ours alone or vLLM's after it under the same load.

The load, its clients and the verdict on the measurement are those of :mod:`loadgen`. Imported where one is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.cli.options import parser
from loadgen.cli.plans import finish_options, plan_of, schedule_of
from loadgen.cli.terminal import LiveLine
from loadgen.drive import drive
from loadgen.environment import environment
from loadgen.interruption import Interruption
from loadgen.preflight import find_server
from loadgen.report.verdict import exit_code, verdict
from loadgen.results import Metric, RequestRecord, Run
from loadgen.served import START_S, Served, started
from services.bench.report import Figure, figure
from services.bench.sides import OURS, VLLM
from services.bench.vllm import START_S as VLLM_START_S
from services.bench.vllm import Vllm

_METRICS: Sequence[tuple[Metric, str]] = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e", "end to end"))
_PARTS = (("p50_ms", "p50"), ("p99_ms", "p99"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server: one that runs at ``url``, or one that ``command`` starts there, which answers at ``ready``."""

    side: str
    url: str
    command: Sequence[str] = ()
    ready: str = "/ready"
    start_s: float = START_S

    def running(self) -> AbstractContextManager[Served | None]:
        """Returns the context in which it serves. Raises ServerEnded: it does not come up."""
        if not self.command:
            return nullcontext()
        return started(self.command, url=self.url, ready=self.ready, start_s=self.start_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The load generator's results, and each request."""

    side: str
    run: Run
    requests: Sequence[RequestRecord]


def ours(words: Sequence[str], port: int) -> Target:
    """Returns the server that ``expertmesh serve`` starts with the options ``words``."""
    command = [sys.executable, "-m", "expertmesh", "serve", *words, "--port", str(port)]
    return Target(side=OURS, url=f"http://127.0.0.1:{port}", command=command)


def theirs(vllm: Vllm, model: str, name: str, port: int, more: Sequence[str]) -> Target:
    """Returns the server that ``vllm serve`` starts."""
    return Target(
        side=VLLM,
        url=f"http://127.0.0.1:{port}",
        command=vllm.serve(model, name, port, more),
        ready="/health",
        start_s=VLLM_START_S,
    )


def measure(target: Target, words: Sequence[str], stop: Interruption, *, show: bool) -> Sample:
    """Returns what the load of ``words``, options of `expertmesh-load run`, saw of a server.

    Raises:
        LoadError: an option, a file or the server cannot be used.
    """
    options = parser("run", "", schedule=True).parse_args([target.url, *words])
    finish_options(options)
    load, replay = schedule_of(options)
    with target.running():
        find_server(target.url, options.model, None, None)
        plan = plan_of(options, load, replay, {"command": [target.url, *words]})
        line = LiveLine(show=show)
        driven = drive(plan, report=line, stop=stop)
        line.clear()
    run = msgspec.structs.replace(driven.run, environment=environment())
    return Sample(side=target.side, run=run, requests=[seen.record() for seen in driven.every()])


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """Returns what went through, and how long it took."""
    return list(_figures({sample.side: sample.run for sample in samples}))


def _figures(runs: Mapping[str, Run]) -> Iterator[Figure]:
    yield figure("requests", "requests", {side: [float(run.counts.scheduled)] for side, run in runs.items()})
    yield figure("of these answered", "requests", {side: [float(run.counts.ok)] for side, run in runs.items()})
    yield figure("requests", "requests/s", {side: [run.rates.requests] for side, run in runs.items()})
    yield figure("input tokens", "tokens/s", {side: _known(run.rates.prompt_tokens) for side, run in runs.items()})
    yield figure("output tokens", "tokens/s", {side: [run.rates.output_tokens] for side, run in runs.items()})
    if any(run.rates.goodput is not None for run in runs.values()):
        yield figure("goodput", "requests/s", {side: _known(run.rates.goodput) for side, run in runs.items()})
    for metric, name in _METRICS:
        for member, part in _PARTS:
            found = {side: _latency(run, metric, member) for side, run in runs.items()}
            if any(found.values()):
                yield figure(f"{name} {part}", "ms", found)


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _latency(run: Run, metric: Metric, member: str) -> list[float]:
    found = run.latency.get(metric)
    return [getattr(found, member)] if found is not None and found.count else []


def verdicts(samples: Sequence[Sample]) -> dict[str, str]:
    """Returns the load generator's own word on each measurement."""
    return {sample.side: verdict(sample.run).line for sample in samples}


def worst(samples: Sequence[Sample]) -> int:
    """Returns the load generator's exit code of the worst run."""
    return max((exit_code(sample.run) for sample in samples), default=0)


def facts(sample: Sample) -> dict[str, Any]:
    """Returns what is known of the server."""
    target = sample.run.target
    return {"url": target.url, "model": target.model, "server": target.server}
