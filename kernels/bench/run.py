"""``python -m bench.run``: ops beside their peers in one process, against the floor; a table, a CSV, plots.

    python -m bench.run --op fused_moe --shape qwen3-30b --rows 1,32,2048 --dtype bf16 --provider ours,vllm
    python -m bench.run --suite figures --plot build/plots

Suffixes in the table: "e" was timed launch by launch because it cannot be captured in a CUDA graph, "cpu" ran without
a GPU and says nothing about speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench import arguments, plot, results
from bench.case import OPS
from bench.floors import WEIGHT_BYTES
from bench.machine import this_machine
from bench.measuring import Settings, measure_shape
from bench.pictures import missing
from bench.precompile import Compilers, compilers
from bench.providers import PROVIDERS
from bench.render import for_suite
from bench.results import Row
from bench.shapes import ROWS, SHAPES, find
from bench.suites import SUITES

CASES: Final[Mapping[str, object]] = {
    "op": ["fused_moe"],
    "shape": [find("qwen3-30b")],
    "rows": list(ROWS),
    "dtype": ["bf16"],
    "provider": ["ours", "vllm", "grouped_mm"],
}
"""Options that choose what is measured without a suite, and their defaults."""
SUITE: Final[Mapping[str, object]] = {"scale": 1, "tokens": None}
"""Options that reduce a suite, and their defaults."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if at least one measurement succeeded."""
    options = _parse(argv)
    rows: list[Row] = []
    machine = this_machine()
    with compilers(options.jobs) as pool:
        settings = _settings(options, pool)
        for row in SUITES[options.suite](settings) if options.suite else _cross_product(options, settings):
            rows.append(row)
            if options.csv:
                results.append(options.csv, [row], machine)
            if not options.quiet:
                _progress(row)
    print(for_suite(settings.suite, rows))
    if options.plot:
        for path in plot.write(rows, options.plot):
            print(path)
    return 0 if any(row.timing for row in rows) else 1


def _settings(options: argparse.Namespace, pool: Compilers | None) -> Settings:
    return Settings(
        device=options.device,
        budget_s=options.budget_s,
        seed=options.seed,
        scale=options.scale,
        tokens=options.tokens,
        suite=options.suite or "run",
        compilers=pool,
    )


def _cross_product(options: argparse.Namespace, settings: Settings) -> Iterator[Row]:
    for shape in options.shape:
        yield from measure_shape(options.op, shape, options.rows, options.dtype, options.provider, settings)


def _progress(row: Row) -> None:
    outcome = f"{row.timing.p50:10.1f} us" if row.timing else row.error[:80]
    print(f"{row.op} {row.shape} {row.dtype} rows {row.rows} {row.provider}: {outcome}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Complete options; what cannot be done ends here, with exit code 2, and not after an hour of measuring."""
    parser = _parser()
    given = parser.parse_args(argv)
    _refuse_mixture(parser, given)
    options = argparse.Namespace(**{**CASES, **SUITE, **vars(given)})
    if options.csv is None and options.device == "cpu":
        print("on a CPU nothing is recorded unless --csv names a file", file=sys.stderr)
    elif options.csv is None:
        options.csv = results.DEFAULT_CSV
    if options.plot and (sentence := missing()):
        parser.error(sentence)
    try:
        if options.csv:
            results.start(options.csv)
        if options.plot:
            options.plot.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        parser.error(f"cannot write what --csv or --plot names: {failure}")
    return options


def _refuse_mixture(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """An option that the run would ignore is an error: its numbers would be of something else than was asked for."""
    ignored = [f"--{name}" for name in (CASES if given.suite else SUITE) if name in given]
    if not ignored:
        return
    cases, suite = (", ".join(f"--{name}" for name in names) for names in (CASES, SUITE))
    where = "with" if given.suite else "without"
    parser.error(f"{', '.join(ignored)} {where} --suite: {suite} belong to a suite, {cases} to a run without one")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.run", description=__doc__.partition("\n")[0] if __doc__ else "")
    _add_choices(parser)
    on_gpu = "on a GPU the repository's bench/results.csv, on a CPU none"
    parser.add_argument("--csv", type=Path, help=f"file to append to; default: {on_gpu}")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write one SVG per op, shape and dtype")
    parser.add_argument("--device", type=arguments.device, default=arguments.default_device(), help="cuda or cpu")
    parser.add_argument("--budget-s", type=arguments.seconds, default=0.4, help="measuring time per case and provider")
    parser.add_argument("--seed", type=int, default=0)
    jobs = "processes that compile kernels before they are measured"
    parser.add_argument("--jobs", type=arguments.whole(1), default=1, help=jobs)
    parser.add_argument("--quiet", action="store_true", help="no line per measurement on stderr")
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """What is measured. No defaults here, so that what was given can be distinguished from what was not."""
    several, absent = "several separated by commas", argparse.SUPPRESS
    shapes = f"{', '.join(SHAPES)} or NAME/DIVISOR; {several}"
    cases = parser.add_argument_group("without --suite")
    cases.add_argument("--op", type=arguments.names(OPS), default=absent, help=f"{', '.join(OPS)}; {several}")
    cases.add_argument("--shape", type=arguments.shapes, default=absent, help=shapes)
    cases.add_argument("--rows", type=arguments.rows, default=absent, help=f"tokens per call, 1 or more; {several}")
    cases.add_argument("--dtype", type=arguments.names(WEIGHT_BYTES), default=absent, help="of the weights")
    cases.add_argument("--provider", type=arguments.names(PROVIDERS), default=absent, help=", ".join(PROVIDERS))
    suites = parser.add_argument_group("a named set of measurements")
    suites.add_argument("--suite", choices=SUITES)
    suites.add_argument("--scale", type=arguments.whole(1), default=absent, help="divide widths by this")
    suites.add_argument(
        "--tokens", type=arguments.whole(1), default=absent, help="per call, instead of the suite's own"
    )


if __name__ == "__main__":
    sys.exit(main())
