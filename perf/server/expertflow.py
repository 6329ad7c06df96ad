"""ExpertFlow's evaluation of a server (thesis, section 6.2.3): tables 6.1 to 6.3, figures 6.2 to 6.5, and an ablation.

    python -m perf.server.expertflow MODEL_FOLDER [--rates 50 100 250 500] [--requests 2560] [--ways server ...]
        [--options '--max-num-seqs 256'] [--static-batch 64] [--ablation-rates 500] [--cores 0 1] [--out DIR]

Serves the model in each way, one after the other, and sends each time ExpertFlow's workload: Poisson arrivals, prompts
of 8 to 128 random tokens, answers of 1 to 128. ``server`` is the server as it is, ``static`` is the same one behind
perf.kit.static_batches, which gives the next batch when the last one has ended; the other ways lack one thing each.
``--cores`` keeps the server and the client off each other's cores: a client that waits for one sends late, and its run
is invalid. Prints the tables. OUT gets a sweep of each way, for `expertmesh-load report` and `diff`, and
expertflow.json, which perf.server.expertflow_picture draws.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from loadgen.drive import Driven, drive
from loadgen.pareto import pareto
from loadgen.plan import Plan
from loadgen.preflight import find_server, warm_up
from loadgen.results import Point, Run, Sweep, write
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals
from loadgen.served import START_S, served, started
from loadgen.workload.bodies import Bodies
from loadgen.workload.lengths import EXPERT_FLOW_REQUESTS, LENGTHS
from loadgen.workload.synthetic import Singles
from loadgen.workload.words import Prompts

PROMPTS, ANSWERS = LENGTHS["expertflow"]
SERVER, STATIC = "server", "static"
LACKS: Mapping[str, str] = {
    "no-lookahead": "--enforce-eager",
    "no-prefix-cache": "--no-prefix-cache",
    "one-at-a-time": "--max-num-seqs 1",
    "disaggregated": "--layout disaggregated",
    "no-overlap": "--layout disaggregated --overlap off",
}
"""Options of ``expertmesh serve`` by way. On a GPU the first one takes the CUDA graphs away, too."""
WARM_UP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One rate of one way: figures as in the tables, and for each request (final length in tokens, latency in ms) where
    it is drawn."""

    way: str
    rate: float
    requests_s: float
    tokens_s: float
    mean_ms: float
    min_ms: float
    max_ms: float
    ttft_p99_ms: float
    failed: int
    lag_p99_ms: float
    valid: bool
    requests: Sequence[tuple[int, float]]


@contextmanager
def pinned(cores: tuple[int, int] | None) -> Iterator[None]:
    """Start programs on the first of ``cores`` while the context is open; what this program does later is done on the
    second one. None: everywhere."""
    if cores is None:
        yield
        return
    server, client = cores
    os.sched_setaffinity(0, {server})
    try:
        yield
    finally:
        os.sched_setaffinity(0, {client})


@contextmanager
def serving(way: str, options: argparse.Namespace) -> Iterator[str]:
    """Serves in this way while the context is open, and returns the address."""
    words = ["--model", str(options.model), "--served-model-name", "m", "--log-level", "warning"]
    words += ["--max-queued-requests", "10000", *shlex.split(options.options), *shlex.split(LACKS.get(way, ""))]
    with ExitStack() as stack:
        with pinned(options.cores):
            url = stack.enter_context(served(words, port=options.port)).url
            if way == STATIC:
                port, size = options.port + 1, options.static_batch
                proxy = [sys.executable, "-m", "perf.kit.static_batches", url, "--port", str(port), "--size", str(size)]
                at = f"http://127.0.0.1:{port}"
                url = stack.enter_context(started(proxy, url=at, ready="/ready", start_s=START_S)).url
        yield url


def plan(url: str, rate: float, requests: int) -> Plan:
    """Returns ExpertFlow's load of ``requests`` at ``rate`` a second. Every way gets the same one."""
    return Plan(
        url=url,
        bodies=Bodies(endpoint="completions", model="m", common={"temperature": 0, "ignore_eos": True}),
        source=Singles(prompts=Prompts(ids=True), prompt_tokens=PROMPTS, output_tokens=ANSWERS, seed=0),
        load=arrivals(flat(rate), Gaps(1.0), seed=0, requests=requests),
    )


def measured(way: str, rate: float, driven: Driven) -> Measured:
    """Returns the figures of a run, whose latencies count from the time of arrival."""
    run, drawn = driven.run, [seen for seen in driven.seen if seen.outcome == "ok" and way in (SERVER, STATIC)]
    e2e, ttft = run.latency.get("e2e"), run.latency.get("ttft")
    return Measured(
        way=way,
        rate=rate,
        requests_s=round(run.rates.requests, 3),
        tokens_s=round(run.rates.output_tokens, 1),
        mean_ms=e2e.mean_ms if e2e else 0.0,
        min_ms=e2e.min_ms if e2e else 0.0,
        max_ms=e2e.max_ms if e2e else 0.0,
        ttft_p99_ms=ttft.p99_ms if ttft else 0.0,
        failed=run.counts.scheduled - run.counts.ok,
        lag_p99_ms=run.validity.lag_p99_ms,
        valid=run.validity.valid,
        requests=[((seen.prompt_tokens or 0) + seen.output_tokens, round(seen.e2e_s * 1e3, 1)) for seen in drawn],
    )


def sweep(way: str, rates: Sequence[float], runs: Sequence[Run]) -> Sweep:
    """Returns the runs of a way in the form that `expertmesh-load report` and `diff` read."""
    points = [
        Point(load=rate, pareto=best, saturated=False, run=run)
        for rate, best, run in zip(rates, pareto(runs), runs, strict=True)
    ]
    first = runs[0]
    return Sweep(
        version=first.version, label=way, target=first.target, began_at=first.began_at, by="rate", points=points
    )


def tables(every: Sequence[Measured]) -> str:
    """Returns the tables in Markdown: throughput and latency of each way by rate."""
    lines = [
        "| arrivals/s | way | requests/s | tokens/s | latency ms: average | min | max | TTFT p99, ms | "
        "failed | sent late, p99 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.rate:g} | {each.way} | {each.requests_s:.1f} | {each.tokens_s:,.0f} | {each.mean_ms:,.0f} | "
        f"{each.min_ms:,.0f} | {each.max_ms:,.0f} | {each.ttft_p99_ms:,.0f} | {each.failed} | "
        f"{each.lag_p99_ms:.2f}{'' if each.valid else ' (invalid)'} |"
        for each in sorted(every, key=lambda each: each.rate)
    ]
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.server.expertflow", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 100.0, 250.0, 500.0])
    parser.add_argument("--ablation-rates", type=float, nargs="+", help="of the ways that lack something")
    parser.add_argument(
        "--requests", type=int, default=EXPERT_FLOW_REQUESTS, help="for each rate (default: %(default)s)"
    )
    parser.add_argument("--ways", nargs="+", choices=[SERVER, STATIC, *LACKS], default=[SERVER, STATIC, *LACKS])
    parser.add_argument("--options", default="", help="more options of expertmesh serve")
    parser.add_argument("--static-batch", type=int, default=64, help="requests (default: %(default)s)")
    parser.add_argument("--cores", type=int, nargs=2, metavar=("SERVER", "CLIENT"), help="a core for each")
    parser.add_argument("--port", type=int, default=8500, help="and the one after it (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(".cache/expertflow"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    every: list[Measured] = []
    for way in options.ways:
        rates = options.rates if way in (SERVER, STATIC) else options.ablation_rates or options.rates
        with serving(way, options) as url:
            find_server(url, "m", None, None)
            warm_up(plan(url, rates[0], 1), WARM_UP)
            driven = [drive(plan(url, rate, options.requests)) for rate in rates]
        found = [measured(way, rate, each) for rate, each in zip(rates, driven, strict=True)]
        every += found
        print(f"{tables(found)}\n", flush=True)
        write(options.out / f"{way}.json", sweep(way, rates, [each.run for each in driven]))
        content = {"requests": options.requests, "measured": [asdict(each) for each in every]}
        (options.out / "expertflow.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    print(tables(every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
