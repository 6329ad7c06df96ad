"""``python -m bench.verify``: every op's kernels against their references on this machine's GPU; exit code 1 on any
failure.

Kernels compile in a pool of processes, one group of checks that share inputs after another. On a CPU the kernels run in
Triton's interpreter (set TRITON_INTERPRET=1), which is slow: pick checks with ``--only``.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from bench import arguments
from bench.checks import all_checks
from bench.checks.base import Check
from bench.table import markdown
from moe_kernels import backend

MAX_PROCESSES: Final = 14
"""Each holds a CUDA context and a layer of up to 200 MB with its float32 reference."""
NEAR: Final = 5
"""Names to offer where ``--only`` matches none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """``share`` of the tolerance that was used up; above 1, or an ``error``, is a failure."""

    name: str
    share: float
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or not self.share <= 1.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    known = all_checks(scale=options.scale)
    if unmatched := [text for text in options.only if not any(text in check.name for check in known)]:
        for text in unmatched:
            print(_nothing_matches(text, [check.name for check in known]), file=sys.stderr)
        return 2
    checks = [check for check in known if _wanted(check.name, options.only)]
    if options.list:
        print("\n".join(check.name for check in checks))
        return 0
    if options.device == "cpu" and not backend.INTERPRETED:
        print("no GPU: set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter", file=sys.stderr)
        return 2
    began = time.monotonic()
    outcomes = list(_progress(run(checks, options.device, options.jobs), len(checks)))
    print(summary(outcomes))
    failures = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failures[: options.show]:
        print(f"FAILED {outcome.name}: {outcome.error or f'{outcome.share:.3g} times the tolerance'}")
    print(f"{len(checks)} checks, {len(failures)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failures or not checks else 0


def run(checks: Iterable[Check], device: str, jobs: int) -> Iterator[Outcome]:
    """Groups of equal key, each in one process; in this one if ``jobs`` is 1."""
    groups = [list(group) for _, group in groupby(checks, key=lambda check: check.key)]
    if jobs == 1:
        for group in groups:
            yield from _run_group(group, device)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(groups) or 1)) as pool:
        work = [(group, device) for group in groups]
        for outcomes in pool.imap_unordered(_run_pair, work, chunksize=1):
            yield from outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line per kind of check (the first word of its name), and what came closest to its tolerance."""
    kinds: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.name.split()[0], []).append(outcome)
    body = []
    for kind, members in kinds.items():
        worst = max(members, key=lambda outcome: outcome.share if outcome.share == outcome.share else float("inf"))
        failed = sum(outcome.failed for outcome in members)
        body.append([kind, f"{len(members)}", f"{failed}", f"{worst.share:.2f}", worst.name])
    return markdown(["check", "runs", "failed", "worst share of tolerance", "there"], body)


def _run_pair(work: tuple[list[Check], str]) -> list[Outcome]:
    return _run_group(*work)


def _run_group(group: list[Check], device: str) -> list[Outcome]:
    outcomes = [_run_one(check, device) for check in group]
    if device != "cpu":
        torch.cuda.empty_cache()  # the other processes want memory, too
    return outcomes


def _run_one(check: Check, device: str) -> Outcome:
    try:
        share = check.run(device)
        if device != "cpu":
            torch.cuda.synchronize()
        return Outcome(name=check.name, share=share)
    except Exception as failure:  # noqa: BLE001 - every check reports, and the exit code says that one failed
        where = traceback.extract_tb(failure.__traceback__)[-1]
        text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:240]} ({where.name}:{where.lineno})"
        return Outcome(name=check.name, share=float("inf"), error=text)


def _progress(outcomes: Iterator[Outcome], total: int) -> Iterator[Outcome]:
    for at, outcome in enumerate(outcomes, start=1):
        if at % 50 == 0 or at == total:
            print(f"{at}/{total}", file=sys.stderr, flush=True)
        yield outcome


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only)


def _nothing_matches(text: str, names: Sequence[str]) -> str:
    """With up to :data:`NEAR` names in which as many words on end as ``text`` has look like it, else the kinds."""
    count = max(1, len(text.split()))
    holders: dict[str, list[str]] = {}
    for name in names:
        words = name.split()
        for start in range(len(words) - count + 1):
            holders.setdefault(" ".join(words[start : start + count]), []).append(name)
    close = difflib.get_close_matches(text.lower(), holders, n=NEAR)
    near = list(dict.fromkeys(name for phrase in close for name in holders[phrase]))[:NEAR]
    kinds = dict.fromkeys(name.split()[0] for name in names)
    hint = f"near it: {'; '.join(near)}" if near else f"names begin with {', '.join(kinds)}"
    return f"--only {text!r} matches nothing; {hint} (--list prints all)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.verify", description="Compares every op with its reference.")
    parser.add_argument("--only", action="append", default=[], help="run checks whose name contains this; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and stop")
    parser.add_argument("--scale", type=arguments.whole(1), default=1, help="divide the layers' widths by this")
    parser.add_argument("--show", type=arguments.whole(0), default=40, help="how many failures to print")
    parser.add_argument("--device", type=arguments.device, default=arguments.default_device(), help="cuda or cpu")
    cores = min(MAX_PROCESSES, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=arguments.whole(1), default=cores if torch.cuda.is_available() else 1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
