"""``expertmesh-load run``, ``search``, ``sweep`` and ``merge``."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from loadgen.around import Around, add_options
from loadgen.cli.options import SECONDS, Parser, given, number, parser, shard, share, start
from loadgen.cli.plans import finish_options, plan_of, schedule_of
from loadgen.cli.realtime import go_first
from loadgen.cli.terminal import LiveLine, probe_line
from loadgen.drive import Driven, drive
from loadgen.errors import BadSetting
from loadgen.interruption import Interruption, signals
from loadgen.merge import merge
from loadgen.pareto import pareto
from loadgen.plan import Closed, Plan
from loadgen.report.text import summary
from loadgen.report.verdict import exit_code
from loadgen.results import CutShort, Point, Probe, Results, Search, Sweep, read_run, write
from loadgen.schedule.curve import flat
from loadgen.schedule.schedule import Schedule, arrivals, at_once
from loadgen.search import RateSearch, SearchOptions
from loadgen.seen import Seen
from loadgen.writable import check_writable


def run(argv: Sequence[str]) -> int:
    found = parser("run", "Send one load to a server and measure what its clients see.", schedule=True)
    group = found.add_argument_group("several machines")
    group.add_argument(
        "--shard", type=shard, default=(0, 1), metavar="I/N", help="send this part of the load, 0/N first"
    )
    begins = "when the schedule begins, for all shards: Unix seconds, or next:60 for the next full minute"
    group.add_argument("--start-at", type=start, metavar="WHEN", help=begins)
    found.add_argument("--requests-file", type=Path, metavar="FILE", help="a line of JSON for each request")
    found.add_argument("--record-answers", type=Path, metavar="FILE", help="for --check of later runs")
    add_options(found)
    options = found.parse_args(argv)
    _prepare(options)
    if options.shard != (0, 1) and options.start_at is None:
        raise BadSetting("A shard has to know when the others begin.", hint="Give all the same --start-at WHEN.")
    load, replay = schedule_of(options)
    around = Around.from_args(options, options.url)
    plan = plan_of(options, load, replay, given(options, argv))
    around.check(load.seconds or None)
    with signals() as stop, TemporaryDirectory(prefix="expertmesh-load-") as folder, around.following() as following:
        start_at = options.start_at.at(time.time()) if options.start_at else None
        plan = replace(plan, shard=options.shard, start_at=start_at, record_to=_fresh(options.record_answers))
        driven = _drive(options, replace(plan, spool=Path(folder)), stop, following.begin)
        if options.requests_file is not None:
            _write_requests(options.requests_file, driven.every())
    result = around.complete(driven.run)
    if options.requests_file is not None:
        result = msgspec.structs.replace(result, requests_file=options.requests_file.name)
    return _put_out(options, result)


def search(argv: Sequence[str]) -> int:
    about = "Find the highest rate at which a server keeps its objectives."
    found = parser("search", about, schedule=False)
    group = found.add_argument_group("search")
    add = group.add_argument
    add("--start", type=SECONDS, default=1.0, metavar="R", help="first rate (default: %(default)s)")
    add("--max-rate", type=SECONDS, default=10_000.0, metavar="R", help="default: %(default)s")
    add("--precision", type=share, default=0.05, help="of the rate found (default: %(default)s)")
    add("--probe-seconds", type=SECONDS, default=30.0, metavar="S", help="of each rate (default: %(default)s)")
    add("--max-probe-seconds", type=SECONDS, default=120.0, metavar="S", help="of a rate that is unsure")
    options = found.parse_args(argv)
    _prepare(options)
    if not options.slo:
        raise BadSetting("Nothing says what the server has to keep.", hint="Give --slo 'ttft:p99<500ms'.")
    began_at, settings = time.time(), given(options, argv)
    plan = plan_of(options, at_once(1), None, settings)
    ways = SearchOptions(
        start=options.start,
        most=options.max_rate,
        precision=options.precision,
        seconds=options.probe_seconds,
        most_seconds=options.max_probe_seconds,
        confidence=options.confidence,
        allow_wrong=options.allow_wrong,
    )
    with signals() as stop, stop.heard():
        measure = partial(_at_rate, options, plan, stop)
        result = RateSearch(measure, options.slo, ways, partial(_say, options)).run()
    best = next((probe.run for probe in result.probes if probe.rate == result.rate), result.probes[-1].run)
    results = Search(
        version=best.version,
        label=options.label,
        target=best.target,
        began_at=began_at,
        confidence=options.confidence,
        objectives=best.objectives,
        rate=result.rate,
        low=result.low,
        high=result.high,
        goodput=result.goodput,
        probes=list(result.probes),
        cut_short=_cut_short(stop, began_at),
        settings=settings,
    )
    return _put_out(options, results)


def sweep(argv: Sequence[str]) -> int:
    found = parser("sweep", "Measure a server at several loads: throughput over latency.", schedule=False)
    group = found.add_argument_group("loads: one of both")
    group.add_argument("--rates", type=_numbers, metavar="R,R,...", help="open loop, a second")
    group.add_argument("--concurrencies", type=_numbers, metavar="N,N,...", help="closed loop, clients")
    group.add_argument("--probe-seconds", type=SECONDS, default=30.0, metavar="S", help="default: %(default)s")
    options = found.parse_args(argv)
    _prepare(options)
    if (options.rates is None) == (options.concurrencies is None):
        raise BadSetting("It is not said which loads.", hint="Give either --rates or --concurrencies.")
    began_at, settings = time.time(), given(options, argv)
    plan = plan_of(options, at_once(1), None, settings)
    loads: Sequence[float] = options.rates or options.concurrencies
    driven: list[Driven] = []
    with signals() as stop, stop.heard():
        for load in loads:
            if options.rates is not None:
                driven.append(_at_rate(options, plan, stop, load, options.probe_seconds))
            else:
                driven.append(_with_clients(options, plan, stop, int(load)))
            if stop.asked is not None:
                break
    best = pareto([each.run for each in driven])
    points = [
        Point(load=load, pareto=chosen, saturated=each.saturated, run=each.run)
        for load, chosen, each in zip(loads, best, driven, strict=False)
    ]
    first = driven[0].run
    results = Sweep(
        version=first.version,
        label=options.label,
        target=first.target,
        began_at=began_at,
        by="rate" if options.rates is not None else "concurrency",
        points=points,
        cut_short=_cut_short(stop, began_at),
        settings=settings,
    )
    return _put_out(options, results)


def merged(argv: Sequence[str]) -> int:
    found = Parser(prog="expertmesh-load merge", description="Add the results of all shards of one run.")
    found.add_argument("files", nargs="+", type=Path)
    found.add_argument("--out", type=Path, metavar="FILE", required=True, help="results as JSON")
    found.add_argument(
        "--allow-wrong", type=share, metavar="SHARE", help="of the answers compared (default: as the runs)"
    )
    found.set_defaults(html=None, junit=None, quiet=False)
    options = found.parse_args(argv)
    result = merge([read_run(path) for path in options.files])
    if options.allow_wrong is not None:
        result = msgspec.structs.replace(result, settings=result.settings | {"allow_wrong": options.allow_wrong})
    return _put_out(options, result)


def _numbers(text: str) -> list[float]:
    return [number(0, above=True)(part) for part in text.split(",")]


def _prepare(options: argparse.Namespace) -> None:
    finish_options(options)
    for name in ("out", "html", "junit", "requests_file", "record_answers"):
        if (path := getattr(options, name, None)) is not None:
            check_writable(path)
    if options.realtime:
        go_first()


def _cut_short(stop: Interruption, began_at: float) -> CutShort | None:
    return None if stop.asked is None else CutShort(signal=stop.asked, at_s=time.time() - began_at)


def _drive(
    options: argparse.Namespace,
    plan: Plan,
    stop: Interruption,
    on_begin: Callable[[float], None] = lambda _at: None,
) -> Driven:
    line = LiveLine(show=not options.quiet)
    driven = drive(plan, options.processes, line, on_begin, stop)
    line.clear()
    return driven


def _at_rate(options: argparse.Namespace, plan: Plan, stop: Interruption, rate: float, seconds: float) -> Driven:
    load: Schedule = arrivals(flat(rate), options.gaps, seed=options.seed, seconds=seconds)
    return _drive(options, replace(plan, load=load, stop_saturated=True), stop)


def _with_clients(options: argparse.Namespace, plan: Plan, stop: Interruption, clients: int) -> Driven:
    return _drive(options, replace(plan, load=Closed(clients, None, options.probe_seconds)), stop)


def _say(options: argparse.Namespace, probe: Probe) -> None:
    if not options.quiet:
        print(probe_line(probe), flush=True)


def _fresh(path: Path | None) -> Path | None:
    if path is not None:
        path.unlink(missing_ok=True)
    return path


def _write_requests(path: Path, every: Iterable[Seen]) -> None:
    with path.open("wb") as file:
        file.writelines(msgspec.json.encode(seen.record()) + b"\n" for seen in every)


def _put_out(options: argparse.Namespace, results: Results) -> int:
    """Write and print ``results``, and return the exit code."""
    if options.out is not None:
        write(options.out, results)
    for name, path in (("html", options.html), ("junit", options.junit)):
        if path is not None:
            importlib.import_module(f"loadgen.report.{name}").write(path, results)
    if not options.quiet:
        print(summary(results), end="")
    return exit_code(results)
