"""Processes, lines and figures of ``perf/fabric/nccl_lane.py``."""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def say(*words: object) -> None:
    print(*words, flush=True)


class Process:
    """This script again in another role; its lines come in a thread, so that no wait is without end."""

    def __init__(self, script: str, *arguments: object) -> None:
        paths = os.pathsep.join([str(ROOT / part) for part in (".", "kernels", "tests")] + sys.path[1:])
        self._process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self.pid = self._process.pid
        self._lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line.strip())
                self._changed.notify_all()

    def hear(self, word: str, seconds: float = 60.0) -> list[str]:
        """The words after ``word`` of the line that begins with it."""
        with self._changed:
            heard = self._changed.wait_for(lambda: self._lines_of(word), seconds)
            assert heard, f"no {word!r} within {seconds} s; exit code {self._process.poll()}; said {self._lines}"
            line = heard[0]
            self._lines.remove(line)
            return line.split()[1:]

    def _lines_of(self, word: str) -> list[str]:
        return [line for line in self._lines if line.startswith(word + " ")]

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()


class Report:
    """Prints as it goes and writes one line of JSON each."""

    def __init__(self, out: Path | None) -> None:
        self._file = (out / "nccl_lane.jsonl").open("w") if out else None
        self._began = time.monotonic()
        self.failed: list[str] = []

    def __call__(self, what: str, **figures: object) -> None:
        say(f"[{time.monotonic() - self._began:6.1f} s] {what}:", ", ".join(f"{k} {v}" for k, v in figures.items()))
        if self._file:
            self._file.write(json.dumps({"what": what} | {k: str(v) for k, v in figures.items()}) + "\n")
            self._file.flush()

    def part(self, work: Callable[[], None], seconds: float) -> None:
        """One part that fails, or that is stuck in a thread of its own, does not end the others."""
        began = time.monotonic()
        thread = threading.Thread(target=self._tried, args=(work,), daemon=True)
        thread.start()
        thread.join(max(0.0, seconds))
        if thread.is_alive():
            faulthandler.dump_traceback()
            self._fail(work, f"not done after {seconds:.0f} s; left alone")
        self(f"{work.__name__} ended", after_s=f"{time.monotonic() - began:.1f}")

    def _tried(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  reported, counted in the exit code
            traceback.print_exc(limit=6)
            self._fail(work, f"{type(error).__name__}: {str(error)[:600]}")

    def _fail(self, work: Callable[[], None], problem: str) -> None:
        self.failed.append(work.__name__)
        self(f"FAILED {work.__name__}", error=problem)


def quantiles(work: Callable[[], object], times: int, warm: int) -> dict[str, float]:
    """Microseconds of wall clock."""
    for _ in range(warm):
        work()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1e6)
    p20, p50, p80 = (statistics.quantiles(taken, n=10)[i] for i in (1, 4, 7))
    return {"p50_us": round(p50, 1), "p20_us": round(p20, 1), "p80_us": round(p80, 1)}
