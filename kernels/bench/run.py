"""``python -m bench.run``: ops beside their peers in one process, against the floor; a table, a CSV, plots.

    python -m bench.run --op fused_moe --shape qwen3-30b --rows 1,32,2048 --dtype bf16 --provider ours,vllm
    python -m bench.run --suite figures --plot build/plots

Suffixes in the table: "e" was timed launch by launch because it cannot be captured in a CUDA graph, "cpu" ran without
a GPU and says nothing about speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from bench import plot, results
from bench.case import OPS
from bench.floors import WEIGHT_BYTES
from bench.machine import this_machine
from bench.measuring import Settings, measure_shape
from bench.precompile import Compilers, compilers
from bench.providers import PROVIDERS
from bench.render import for_suite
from bench.results import Row
from bench.shapes import ROWS, SHAPES, find
from bench.suites import SUITES


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if at least one measurement succeeded."""
    options = _parser().parse_args(argv)
    rows: list[Row] = []
    machine = this_machine()
    with compilers(options.jobs) as pool:
        settings = _settings(options, pool)
        for row in SUITES[options.suite](settings) if options.suite else _cross_product(options, settings):
            rows.append(row)
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
    for name in options.shape:
        yield from measure_shape(options.op, find(name), options.rows, options.dtype, options.provider, settings)


def _progress(row: Row) -> None:
    outcome = f"{row.timing.p50:10.1f} us" if row.timing else row.error[:80]
    print(f"{row.op} {row.shape} {row.dtype} rows {row.rows} {row.provider}: {outcome}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.run", description=__doc__.partition("\n")[0] if __doc__ else "")
    several = "several separated by commas"
    parser.add_argument("--op", type=_Names(OPS), default=["fused_moe"], help=f"{', '.join(OPS)}; {several}")
    parser.add_argument("--shape", type=_list, default=["qwen3-30b"], help=f"{', '.join(SHAPES)} or NAME/DIVISOR")
    parser.add_argument("--rows", type=_numbers, default=list(ROWS), help=f"tokens per call; {several}")
    parser.add_argument("--dtype", type=_Names(WEIGHT_BYTES), default=["bf16"], help="of the weights")
    parser.add_argument("--provider", type=_Names(PROVIDERS), default=["ours", "vllm", "grouped_mm"])
    parser.add_argument("--suite", choices=SUITES, help="a named set of measurements instead of the above")
    parser.add_argument("--scale", type=int, default=1, help="suites: divide widths by this")
    parser.add_argument("--tokens", type=int, help="suites: tokens per call instead of the suite's own")
    parser.add_argument("--csv", type=Path, default=results.DEFAULT_CSV, help="file to append to")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write one SVG per op, shape and dtype")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-s", type=float, default=0.4, help="measuring time per case and provider")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile kernels before they are measured")
    parser.add_argument("--quiet", action="store_true", help="no line per measurement on stderr")
    return parser


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _list(text)]


class _Names:
    """argparse type: comma-separated names out of ``known``."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = tuple(known)

    def __call__(self, text: str) -> list[str]:
        unknown = [name for name in _list(text) if name not in self._known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(self._known)}")
        return _list(text)


if __name__ == "__main__":
    sys.exit(main())
