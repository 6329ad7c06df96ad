"""``python -m bench.tune``: fills the tile table of this machine's GPU by measuring whole calls with candidate tiles.

    python -m bench.tune --shape qwen3-30b,olmoe --rows 1,8,32,128 --dtype bf16 --budget-s 300

A pool of processes compiles every candidate first (into Triton's cache on disk), then each is timed here.
What the table has with a time is skipped, so an interrupted run goes on where it stopped; ``--again`` measures again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.pool
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bench import arguments, candidates, tile_file
from bench.bank import Bank, poison
from bench.candidates import PRESETS, Tiles
from bench.case import Case, activation_dtype, deviation
from bench.floors import WEIGHT_BYTES
from bench.measuring import WRONG, WRONG_ROUNDED, Kept, Settings, release
from bench.providers.ours import prepare_ours
from bench.shapes import ROWS, SHAPES, LayerShape
from bench.timing import measure
from bench.tune_workers import Work, compilers, make_case, run_once
from moe_kernels import tiles as table
from moe_kernels.tiles import Entry

OPS: Final = (
    "gemv", "small.in", "small.down", "large.in", "large.down", "rounded.in", "rounded.down", "combine", "fused_moe",
    "rounded_rows",
)  # fmt: skip
"""In this order: which regime is the fastest, "fused_moe" and "rounded_rows" say by what the others reached."""
DECIDED: Final = ("fused_moe", "rounded_rows")
NOTABLE: Final = 0.99
"""A switch is thrown only if it saves more than noise: 1 %."""
POISONED: Final = (1 << 20, 1 << 24)


class Tuner:
    """Searches one layer's ops; ``chosen`` holds what was found so far, so that each op is timed beside good others."""

    def __init__(self, work: Work, pool: multiprocessing.pool.Pool | None, budget_s: float) -> None:
        self._work = work
        self._pool = pool
        self._budget_s = budget_s
        self._bank = Bank(work.shape, work.device, activation_dtype=activation_dtype(work.dtype))
        self._cases: dict[int, Case] = {}
        self._expected: dict[tuple[int, bool], Tensor] = {}

    def search(self, op: str, rows: int, chosen: Mapping[str, Tiles]) -> tuple[Tiles, float]:
        """The fastest tiles of ``op`` and the microseconds of the whole call with them."""
        start = dict(chosen.get(op) or lookup(op, self._work, rows))
        kind, _, part = op.partition(".")
        if part == "down" and kind != "small" and f"{kind}.in" in chosen:
            start["BLOCK_M"] = chosen[f"{kind}.in"]["BLOCK_M"]
        others = {**chosen, **candidates.forced(op)}
        case = self._case(rows)
        best, best_us = start, self._time(case, {**others, op: start})
        for changes in candidates.stages(op, self._work.shape, rows, self._work.dtype):
            options = candidates.variants(op, best, changes, self._work.shape, self._work.dtype)
            for tiles in self._compiled(op, rows, options, others):
                us = self._time(case, {**others, op: tiles})
                if us < best_us * (NOTABLE if len(changes) == 1 else 1.0):
                    best, best_us = tiles, us
        return best, best_us

    def _case(self, rows: int) -> Case:
        """The same inputs for all searches at these rows: outputs are compared."""
        if rows not in self._cases:
            self._cases[rows] = make_case(self._work, self._bank, rows)
        return self._cases[rows]

    def _compiled(self, op: str, rows: int, options: list[Tiles], others: Mapping[str, Tiles]) -> list[Tiles]:
        """Those that compile and run."""
        if self._pool is None:
            return options
        jobs = [(rows, {**others, op: tiles}) for tiles in options]
        errors = self._pool.starmap(run_once, jobs, chunksize=1)
        failed = [error for error in errors if error]
        if failed:
            print(f"  {len(failed)} of {len(jobs)} candidates for {op} do not run, e.g. {failed[0]}", file=sys.stderr)
        return [tiles for tiles, error in zip(options, errors, strict=True) if not error]

    def _time(self, case: Case, choices: Mapping[str, Tiles]) -> float:
        try:
            with table.overridden(choices), torch.no_grad():
                poison(case.device, sizes=POISONED)
                call = Kept(prepare_ours(case), case.copies)
                rounded = bool(choices["rounded_rows"]["FROM_ROWS"])
                self._require_right(case, call(0), rounded)
                timing = measure(call, copies=case.copies, device=case.device, budget_s=self._budget_s)
                # What the last replay left: launches that overlap may be right only one by one.
                self._require_right(case, call.kept, rounded)
                return timing.p50
        except Exception as failure:  # noqa: BLE001 - a candidate that does not run is not chosen
            print(f"  {type(failure).__name__}: {str(failure)[:120]} with {choices}", file=sys.stderr)
            return float("inf")

    def _require_right(self, case: Case, y_TD: object, rounded: bool) -> None:
        """Against float32 the first time, then against what passed: a compiler's mistake must not win by its speed."""
        assert isinstance(y_TD, Tensor)
        expected = self._expected.get((case.rows, rounded))
        limit = WRONG_ROUNDED if rounded and expected is None else WRONG[activation_dtype(case.dtype)]
        off = deviation(case, y_TD) if expected is None else float((y_TD.float() - expected).norm() / expected.norm())
        if not off <= limit:
            raise AssertionError(f"wrong: deviates by {off:.3g}")
        self._expected.setdefault((case.rows, rounded), y_TD.float())


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    device_name = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    path = options.out or table.DIRECTORY / table.file_name(device_name)
    deadline = time.monotonic() + options.budget_s
    for shape in options.shape:
        for dtype in options.dtype:
            work = Work(shape=shape, dtype=dtype, device=options.device)
            missing = _missing(work, options, path)
            if not missing:
                print(f"{shape.name} {dtype}: all in the table")
                continue
            if not _tune_layer(work, missing, options, path, device_name, deadline):
                print("out of time; run again to go on")
                return 0
    return 0


def _tune_layer(
    work: Work, missing: Mapping[int, list[str]], options: argparse.Namespace, path: Path, device: str, deadline: float
) -> bool:
    """False if the time ran out."""
    with compilers(work, options.jobs) as pool:
        tuner = Tuner(work, pool, options.case_s)
        for rows, ops in missing.items():
            chosen, reached = _known(work, rows, path, set(ops))
            for op in ops:
                if time.monotonic() > deadline:
                    return False
                tiles, us = _decide(op, work.shape, reached) if op in DECIDED else tuner.search(op, rows, chosen)
                if us == float("inf"):
                    continue
                chosen[op] = tiles
                reached[op] = us
                _store(path, device, work, rows, op, tiles, us)
                print(f"{work.shape.name} {work.dtype} rows {rows} {op}: {us:.1f} us {tiles}", flush=True)
    del tuner
    release(Settings(device=work.device))
    return True


def _known(work: Work, rows: int, path: Path, again: set[str]) -> tuple[dict[str, Tiles], dict[str, float]]:
    """Tiles and microseconds by op of what an earlier run has measured here, but for the ops to measure again."""
    chosen: dict[str, Tiles] = {}
    reached: dict[str, float] = {}
    for entry in tile_file.read(path):
        shape, dtype = key_of(entry.op, work)
        same = (dict(entry.shape), entry.dtype, entry.rows) == (shape, dtype, rows)
        if same and entry.us and entry.op not in again | set(DECIDED):
            chosen[entry.op] = dict(entry.tiles)
            reached[entry.op] = entry.us
    return chosen, reached


def _decide(op: str, shape: LayerShape, reached: Mapping[str, float]) -> tuple[Tiles, float]:
    """Tiles of an op that is one of :data:`DECIDED`; rounding is compared with ways that were measured beside it."""
    tiles, us = _regime(shape, reached)
    if op == "fused_moe" or us == float("inf"):
        return tiles, us
    rounded = min((reached[name] for name in ("rounded.in", "rounded.down") if name in reached), default=float("inf"))
    return {"FROM_ROWS": int(rounded < us)}, min(rounded, us)


def _regime(shape: LayerShape, reached: Mapping[str, float]) -> tuple[Tiles, float]:
    """Thresholds that send calls near these rows into the regime that was the fastest here.

    Every time is of a whole call, so a regime's is the least that any of its ops' searches reached.
    """
    known: dict[str, float] = {}
    for op, us in reached.items():
        regime = op.partition(".")[0]
        if regime in PRESETS:
            known[regime] = min(us, known.get(regime, us))
    if not known:
        return {}, float("inf")
    best = min(known, key=lambda name: known[name])
    most = {"gemv": candidates.GEMV_MAX_ROWS, "small": candidates.SMALL_MAX_PAIRS // shape.k}
    return {
        "GEMV_ROWS": most["gemv"] if best == "gemv" else 0,
        "SMALL_ROWS": 0 if best == "large" else most["small"],
    }, known[best]


def lookup(op: str, work: Work, rows: int) -> Mapping[str, int]:
    name = torch.cuda.get_device_name() if work.device != "cpu" else None
    shape, dtype = key_of(op, work)
    return table.tiles(op, shape=shape, rows=rows, dtype=dtype, device_name=name)


def key_of(op: str, work: Work) -> tuple[dict[str, int], str]:
    """Shape and dtype as the op's launcher looks them up."""
    shape = work.shape
    if op == "combine":
        return {"d": shape.d, "k": shape.k}, "any"
    gated = shape.in_rows // shape.f
    return {"d": shape.d, "f": shape.f, "E": shape.E, "k": shape.k, "gated": gated}, work.dtype


def _store(path: Path, device: str, work: Work, rows: int, op: str, tiles: Tiles, us: float) -> None:
    shape, dtype = key_of(op, work)
    entry = Entry(op=op, dtype=dtype, shape=tuple(shape.items()), rows=rows, tiles=tiles, us=us)
    tile_file.write(path, device, tile_file.merged(tile_file.read(path), [entry]))
    table.forget()


def _missing(work: Work, options: argparse.Namespace, path: Path) -> dict[int, list[str]]:
    """Ops to search by rows, in the order of :data:`OPS`."""
    known = {tile_file.key(entry) for entry in tile_file.read(path) if entry.us}
    found: dict[int, list[str]] = {}
    for rows in options.rows:
        regimes = {*candidates.regimes(work.shape, rows, work.dtype), "combine", "fused_moe"}
        regimes |= {"rounded_rows"} if candidates.ROUNDED in regimes else set()
        ops = [op for op in OPS if op in options.op and op.partition(".")[0] in regimes]
        for op in ops:
            shape, dtype = key_of(op, work)
            if options.again or (op, dtype, tuple(sorted(shape.items())), rows) not in known:
                found.setdefault(rows, []).append(op)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.tune", description="Fills the tile table of this machine's GPU.")
    parser.add_argument("--op", type=arguments.names(OPS), default=list(OPS))
    parser.add_argument("--shape", type=arguments.shapes, default=[s for s in SHAPES.values() if s.tuned])
    parser.add_argument("--rows", type=arguments.rows, default=list(ROWS))
    parser.add_argument("--dtype", type=arguments.names(WEIGHT_BYTES), default=["bf16"])
    parser.add_argument("--budget-s", type=arguments.seconds, default=600.0, help="stop starting searches after this")
    parser.add_argument("--case-s", type=arguments.seconds, default=0.03, help="measuring time per candidate")
    parser.add_argument("--again", action="store_true", help="measure what the table has already")
    parser.add_argument("--out", type=Path, help="the table's file; default: the package's, by GPU name")
    parser.add_argument("--device", type=arguments.device, default=arguments.default_device(), help="cuda or cpu")
    parser.add_argument("--jobs", type=arguments.whole(1), default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
