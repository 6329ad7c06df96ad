"""`expertmesh bench latency|throughput|serve`: from options to a table, a file of results and a picture."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loadgen.interruption import Interruption, signals
from loadgen.writable import check_writable, write_whole
from services.bench import latency, options, throughput
from services.bench.options import Given
from services.bench.picture import check as check_picture
from services.bench.picture import drawn
from services.bench.prepare import Prepared
from services.bench.progress import Progress
from services.bench.report import Figure, Kind, Report, encoded, origin
from services.bench.sides import OURS, VLLM, Side
from services.bench.table import text
from services.config import chosen

if TYPE_CHECKING:
    from services.bench.ours import OurEngine

_INTERRUPTED = 130
_USAGE = """usage: expertmesh bench COMMAND [MODEL] [OPTIONS]

Measures how fast a model is computed and served, by itself or beside vLLM (--against vllm).

  latency     time of a decode step, and prompt tokens a second, by batch; without a server
  throughput  all requests at once, without a server
  serve       a server under load: TTFT, gaps between tokens, goodput

`expertmesh bench COMMAND --help` lists the options of a command."""


def main(argv: Sequence[str]) -> int:
    """Measures, and returns the exit code: of `serve` that of expertmesh-load.

    Raises:
        ExpertMeshError: nothing can be measured; the error says why.
    """
    commands: Mapping[str, Callable[[Sequence[str], Interruption], int]] = {
        "latency": _latency,
        "throughput": _throughput,
        "serve": _serve,
    }
    measure = chosen("expertmesh bench", argv, commands, _USAGE)
    with signals() as stop:
        try:
            return measure(argv[1:], stop)
        except KeyboardInterrupt:
            print("\nexpertmesh: ended before anything was measured.", file=sys.stderr)
            return _INTERRUPTED


def _latency(argv: Sequence[str], stop: Interruption) -> int:
    given = options.latency_options(argv)
    own = given.own
    asked = latency.Asked(
        batches=options.batches(given),
        input_len=own.input_len,
        output_len=own.output_len,
        rounds=own.num_iters,
        warmups=own.num_iters_warmup,
        seed=own.seed,
    )
    _check_output(given)
    prepared = Prepared.of(given)
    latency.check_length(asked.input_len + asked.output_len, prepared.longest)
    return _compared(
        "latency",
        given,
        prepared,
        asked.text,
        check=lambda engine: latency.check(asked, engine.limits),
        measure=lambda side, progress: latency.measure(side, asked, prepared.spec.vocab_size, progress),
        figures=latency.figures,
        stop=stop,
    )


def _throughput(argv: Sequence[str], stop: Interruption) -> int:
    given = options.throughput_options(argv)
    _check_output(given)
    own, prepared = given.own, Prepared.of(given)
    source = throughput.workload(
        own.workload,
        own.dataset_path,
        input_len=own.input_len,
        output_len=own.output_len,
        vocab=prepared.spec.vocab_size,
        seed=own.seed,
    )
    requests = throughput.requests_of(source, own.num_prompts)
    asked = throughput.Asked(
        source=source, requests=requests, rounds=own.num_iters, warmups=own.num_warmups, seed=own.seed
    )
    batch = throughput.batch_of(source, requests, prepared.folder)
    latency.check_length(batch.longest, prepared.longest)
    return _compared(
        "throughput",
        given,
        prepared,
        asked.text,
        check=lambda engine: throughput.check(batch, engine.limits),
        measure=lambda side, progress: throughput.measure(side, asked, batch, progress),
        figures=throughput.figures,
        stop=stop,
    )


def _compared(
    kind: Kind,
    given: Given,
    prepared: Prepared,
    workload: str,
    *,
    check: Callable[[OurEngine], None],
    measure: Callable[[Side, Progress], Iterator[Any]],
    figures: Callable[[Sequence[Any], Sequence[str]], list[Figure]],
    stop: Interruption,
) -> int:
    """Measures our engine, and vLLM's after it, for one GPU has room for one of them. Ctrl-C keeps what there is."""
    began_at, progress = time.time(), Progress()
    samples: list[Any] = []
    sides: dict[str, Mapping[str, Any]] = {}
    cut_short = False
    try:
        progress.stage(f"{OURS}: loading {prepared.name}")
        _import_engine(stop)
        engine = prepared.ours()
        try:
            check(engine)
            sides[OURS] = ours = dict(engine.facts)
            _collect(measure(engine, progress), samples)
        finally:
            engine.close()
        if prepared.vllm is not None:
            progress.stage(f"{VLLM}: starting")
            other = prepared.theirs(prepared.vllm, ours)
            try:
                sides[VLLM] = {"version": prepared.vllm.version} | dict(other.facts)
                _collect(measure(other, progress), samples)
            finally:
                other.close()
    except KeyboardInterrupt:
        if not samples:
            raise
        cut_short = True
    progress.clear()
    found = figures(samples, list(sides))
    report = _report(kind, given, prepared.name, workload, began_at, sides, found, samples)
    return _put_out(replace(report, cut_short=cut_short), given, 0)


def _import_engine(stop: Interruption) -> None:
    """Imports what computes. A Ctrl-C in the middle is heard after it: torch ignores what is raised while it imports
    numpy, and goes on with half of it."""
    with stop.heard():
        importlib.import_module("services.bench.ours")
    if stop.asked is not None:
        raise KeyboardInterrupt


def _collect(found: Iterator[Any], into: list[Any]) -> None:
    """Puts each sample into ``into`` as soon as it is there: what comes before a Ctrl-C stays."""
    for sample in found:
        into.append(sample)  # noqa: PERF402 -- the same, but said


def _serve(argv: Sequence[str], stop: Interruption) -> int:
    from services.bench import serve, serving

    given = options.serve_options(argv)
    _check_output(given)
    found = serving.prepare(given)
    began_at, progress = time.time(), Progress()
    samples: list[serve.Sample] = []
    cut_short = False
    try:
        for target in found.targets:
            progress.stage(f"{target.side}: {'starting, then ' if target.command else ''}under load")
            samples.append(serve.measure(target, found.load, stop, show=True))
            if stop.asked is not None:
                break
    except KeyboardInterrupt:
        if not samples:
            raise
        cut_short = True
    progress.clear()
    sides = {sample.side: {**found.facts[sample.side], **serve.facts(sample)} for sample in samples}
    workload = f"{samples[0].run.schedule.text}, {samples[0].run.workload.text}"
    model = str(given.settings.model or samples[0].run.target.model)
    report = _report("serve", given, model, workload, began_at, sides, serve.figures(samples), samples)
    report = replace(report, verdicts=serve.verdicts(samples), cut_short=cut_short or stop.asked is not None)
    return _put_out(report, given, serve.worst(samples))


def _check_output(given: Given) -> None:
    check_picture(given.own.picture)
    for path in (given.own.json, given.own.picture):
        if path is not None:
            check_writable(path)


def _report(
    kind: Kind,
    given: Given,
    model: str,
    workload: str,
    began_at: float,
    sides: Mapping[str, Mapping[str, Any]],
    figures: Sequence[Figure],
    samples: Sequence[Any],
) -> Report:
    return Report(
        kind=kind,
        began_at=began_at,
        model=model,
        workload=workload,
        seed=given.own.seed,
        options=given.shown(),
        sides=sides,
        figures=figures,
        samples=samples,
        **origin(),
    )


def _put_out(report: Report, given: Given, code: int) -> int:
    try:
        if given.own.json is not None:
            write_whole(given.own.json, encoded(report))
        if given.own.picture is not None:
            write_whole(given.own.picture, drawn(report).encode())
    finally:  # what took minutes to measure is not lost with a file
        sys.stdout.write(text(report))
    return _INTERRUPTED if report.cut_short else code
