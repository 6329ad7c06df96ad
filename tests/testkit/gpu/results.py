"""Runs the tests that need GPUs and keeps a record of it in the repository, whose age CI checks.

    make gpu1-test, or: python -m testkit.gpu.results [--set gpu1] [--commit SHA] [--out FILE] [arguments of pytest]

A set of tests protects rooms, which are files and folders that no test without a GPU covers. The record holds a hash of
each room's content. A room that has changed since may be up to :data:`MAX_COMMITS` commits younger than the record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "tests/gpu_results.json"
MAX_COMMITS = 30
"""Most commits that may change a room after the recorded run. A merge is none: what it brings has been counted. Time
does not count: what stays as it is does not age."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """``paths`` from the root of the repository, and ``why`` they need a GPU."""

    paths: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSet:
    """Tests with the marker ``name`` in ``folders``, and the rooms that they protect."""

    name: str
    folders: tuple[str, ...]
    rooms: Mapping[str, Room]


SETS = {
    one.name: one
    for one in (
        GpuSet(
            name="gpu1",
            folders=("tests/gpu", "tests/contract"),
            rooms={
                "kernels": Room(
                    paths=("kernels/moe_kernels",),
                    why="the interpreter knows neither rounding nor races of a GPU, and runs no machine code",
                ),
                "steps": Room(
                    paths=("services/attention/step", "services/attention/sampling", "services/model/transfer.py",
                           "services/model/paged_attention.py", "services/model/dense.py"),
                    why="on a CPU nothing is asynchronous, and CudaCapture does not run",
                ),
                "shared memory": Room(
                    paths=("services/fabric/shared_memory", "services/fabric/device_counters.py"),
                    why="CudaMemory calls the driver, and seats run their steps as CUDA graphs",
                ),
                "experts": Room(
                    paths=("services/experts/serving.py", "services/model/experts.py"),
                    why="on a GPU a seat computes by other kernels, on streams of its own",
                ),
            },
        ),
        GpuSet(
            name="gpu",
            folders=("tests/contract",),
            rooms={
                "between GPUs": Room(
                    paths=("services/fabric/nccl", "services/fabric/lockstep/nccl.py", "services/fabric/shared_memory"),
                    why="NCCL and memory of another GPU need two",
                ),
            },
        ),
    )
}  # fmt: skip


class UnknownAge(Exception):
    """This clone lacks the history from which the age of the record follows."""


def content(room: Room, root: Path = ROOT, commit: str = "") -> str:
    """Return the hash of the room's files, as git would name them, in the working tree or at ``commit``."""
    if commit:
        listed = _git(root, "ls-tree", "-r", commit, "--", *room.paths).splitlines()
        named = [(path, entry.split()[2]) for entry, path in (line.split("\t") for line in listed)]
    else:
        files = [file for path in room.paths for file in _files(root / path)]
        named = [(file.relative_to(root).as_posix(), _blob(file.read_bytes())) for file in files]
    return hashlib.sha256("".join(f"{path} {blob}\n" for path, blob in sorted(named)).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def problems(of: GpuSet, record: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """Return what is wrong with the record of a set, a sentence each.

    Raises:
        UnknownAge: a room has changed, and this clone lacks the commit of the record.
    """
    found = [f"{of.name}: {record['failed']} tests failed."] if record["failed"] else []
    if not record["passed"]:
        found.append(f"{of.name}: no test passed.")
    for name, room in of.rooms.items():
        hashed = record["rooms"].get(name)
        if hashed == content(room, root):
            continue
        if hashed != _content_then(room, root, record["commit"]):
            found.append(f"{of.name}: the record's {name} is not that of its commit. Record a run of a clean tree.")
            continue
        since = int(_git(root, "rev-list", "--no-merges", "--count", f"{record['commit']}..HEAD", "--", *room.paths))
        if since > MAX_COMMITS:
            found.append(
                f"{of.name}: {since} commits changed {name} since it last ran on a GPU, at most {MAX_COMMITS} may: "
                f"{room.why}. Run `make {of.name}-test` there."
            )
    return found


def _content_then(room: Room, root: Path, commit: str) -> str:
    try:
        _git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnknownAge(
            f"the age of tests/gpu_results.json is unknown: commit {commit} is not in this clone. If it is a shallow "
            "one: git fetch --unshallow"
        ) from error
    return content(room, root, commit)


@dataclass(eq=False)
class Recorder:
    """A plugin of pytest that counts outcomes."""

    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.outcomes["skipped"] += 1
            assert isinstance(report.longrepr, tuple)
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.failed:
            self.outcomes["failed"] += 1
            self.failed.append(report.nodeid)
        elif report.when == "call":
            self.outcomes["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["failed"] += 1
            self.failed.append(report.nodeid)


def measured(of: GpuSet, recorder: Recorder, seconds: float, commit: str) -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "gpus": gpus, "cuda": torch.version.cuda,
        "torch": torch.__version__, "triton": metadata.version("triton"), "python": sys.version.split()[0],
        "seconds": round(seconds), "passed": recorder.outcomes["passed"], "failed": recorder.outcomes["failed"],
        "failures": recorder.failed, "skipped": dict(recorder.skipped),
        "rooms": {name: content(room) for name, room in of.rooms.items()},
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="testkit.gpu.results", description=__doc__, allow_abbrev=False)
    parser.add_argument("--set", choices=SETS, default="gpu1", dest="of")
    parser.add_argument("--commit", default="", help="of this tree, where there is no git; else HEAD")
    parser.add_argument("--out", type=Path, default=RECORD, help="other sets in it stay as they are")
    options, others = parser.parse_known_args(argv)
    of, recorder, began = SETS[options.of], Recorder(), time.monotonic()
    commit = options.commit or _git(ROOT, "rev-parse", "HEAD")
    code = pytest.main(["-q", "-m", of.name, "--durations=15", *of.folders, *others], plugins=[recorder])
    if not recorder.outcomes["passed"] + recorder.outcomes["failed"]:
        print(f"nothing ran, so nothing is recorded: {dict(recorder.skipped)}", file=sys.stderr)
        return int(code) or 1
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    known[of.name] = measured(of, recorder, time.monotonic() - began, commit)
    options.out.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    print(f"recorded in {options.out}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
