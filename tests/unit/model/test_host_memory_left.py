"""How much memory a process may still take: of the host, and of the containers that it is in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.model.host_memory import spare

KIB = 1 << 10


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A host of 1,000 KiB, of which 300 are left; a twentieth is 50."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:     1000 kB\nMemFree:     20 kB\nMemAvailable:     300 kB\n")
    (folder / "self/cgroup").write_text("0::/pods/one\n")
    return folder


def group(folder: Path, most: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_without_a_container_it_is_the_hosts(proc: Path, tmp_path: Path) -> None:
    assert spare(proc, tmp_path / "none") == 250 * KIB
    (proc / "self/cgroup").unlink()
    assert spare(proc, tmp_path / "none") == 250 * KIB


@pytest.mark.parametrize(
    ("own", "above", "found"),
    [("max", "max", 250), ("200", "max", 200 - 10 - 60), ("200", "150", 150 - 7.5 - 60), ("60", "max", -3)],
)
def test_the_narrowest_container_counts(proc: Path, tmp_path: Path, own: str, above: str, found: float) -> None:
    """Files that are cached count as free; what is used beyond them is 60 KiB."""
    groups = tmp_path / "cgroup"
    for folder, most in ((groups / "pods/one", own), (groups / "pods", above)):
        group(folder, most if most == "max" else str(int(most) * KIB), 90 * KIB, 30 * KIB)
    assert spare(proc, groups) == pytest.approx(found * KIB, abs=1)


def test_a_system_that_does_not_say_bounds_nothing(tmp_path: Path) -> None:
    assert spare(tmp_path, tmp_path) == sys.maxsize


def test_this_machine_has_some() -> None:
    assert 0 < spare() < 1 << 50
