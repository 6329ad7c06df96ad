"""docs/kernels.md's tables from results.csv."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import report, results
from bench.machine import Machine
from bench.results import Row
from bench.timing import Timing

H200 = Machine(gpu="NVIDIA H200", torch="2.11", triton="3.6", vllm="0.25.1", date="2026-11-21", commit="abc")
CPU = Machine(gpu="none", torch="2.13", triton="3.7", vllm="", date="2026-11-22", commit="def")
TEXT = "# Title\nkept\n<!-- bench:figures -->\nold\n<!-- /bench -->\nkept too\n<!-- bench:int4 -->\n<!-- /bench -->\n"


def row(p50: float, provider: str = "ours", suite: str = "figures", rows: int = 8, **fields: object) -> Row:
    timing = Timing(p20=p50, p50=p50, p80=p50, clock="graph")
    base = {"op": "fused_moe", "shape": "qwen3-30b", "dtype": "bf16", "floor_us": 100.0, "timing": timing}
    return Row(suite=suite, provider=provider, rows=rows, **{**base, **fields})  # type: ignore[arg-type]


def write(path: Path, *rows: Row, machine: Machine = H200) -> None:
    results.append(path, rows, machine)


def test_tables_hold_the_latest_gpu_measurements_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write(path, row(400), row(250, "vllm"), row(99, "vllm", suite="run"))
    write(path, row(125), row(0, "grouped_mm", timing=None, error="unsupported: no"))
    write(path, row(7), machine=CPU)
    text = report.regenerate(TEXT, results.read(path))
    lines = text.splitlines()
    assert lines[:3] == TEXT.splitlines()[:3]
    assert "kept too" in lines
    at = lines.index("All lines: op fused_moe, shape qwen3-30b, dtype bf16, rows 8.")
    assert _cells(lines[at + 2]) == ["floor us", "ours", "vllm", "peer / ours"]
    assert _cells(lines[at + 4]) == ["100", "125 (80 %)", "250 (40 %)", "2.00"]
    assert "NVIDIA H200; torch 2.11; triton 3.6; vllm 0.25.1; 2026-11-21, commit abc." in lines
    assert "unsupported" not in text
    assert "<!-- bench:int4 -->\nNot measured yet.\n<!-- /bench -->" in text


def test_regenerating_changes_nothing_the_second_time(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write(path, row(400), row(300, suite="int4", dtype="int4"))
    once = report.regenerate(TEXT, results.read(path))
    assert report.regenerate(once, results.read(path)) == once != TEXT


def test_elephants_are_shown_relative_to_float16(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    suite = "elephants-table1"
    names = {"fp16": 30.0, "int8 native": 20.0, "int8 trick": 15.0}
    write(path, *(row(p50, name, suite, op="convert_gemm", dtype="x") for name, p50 in names.items()))
    text = report.regenerate(f"<!-- bench:{suite} -->\n<!-- /bench -->\n", results.read(path))
    assert _cells(text.splitlines()[5]) == ["30.0 (333 %)", "20.0 (500 %) 1.50x", "15.0 (667 %) 2.00x"]


def test_weights_are_shown_by_dtype_beside_the_fastest_peer(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    for dtype, peers in (("bf16", {}), ("int4", {"slow": 90.0, "vllm_marlin": 60.0})):
        for name, p50 in ({"ours": 50.0} | peers).items():
            write(path, *(row(p50 * rows, name, "int4", rows=rows, dtype=dtype) for rows in (1, 2)))
    text = report.regenerate("<!-- bench:int4 -->\n<!-- /bench -->\n", results.read(path))
    assert [_cells(line) for line in text.splitlines()[3:7] if "---" not in line] == [
        ["rows", "bf16", "int4"],
        ["1", "50.0 (200 %)", "50.0 (200 %) 1.20x"],
        ["2", "100 (100 %)", "100 (100 %) 1.20x"],
    ]


def test_memory_stands_beside_the_times_of_its_provider(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write(path, row(50, memory_mib=512.0), row(60, "vllm", memory_mib=2048.0), row(50, rows=9))
    lines = report.regenerate(TEXT, results.read(path)).splitlines()
    at = lines.index("All lines: op fused_moe, shape qwen3-30b, dtype bf16.")
    assert _cells(lines[at + 2]) == ["rows", "floor us", "ours", "vllm", "peer / ours", "ours GiB", "vllm GiB"]
    assert [_cells(line)[-2:] for line in lines[at + 4 : at + 6]] == [["0.5", "2.00"], ["-", "-"]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")][1:-1]


def test_failures_on_a_gpu_stay_visible(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    write(path, row(400), row(0, "vllm", timing=None, error="RuntimeError: boom"))
    assert "RuntimeError: boom" in report.regenerate(TEXT, results.read(path))


@pytest.mark.parametrize("field", ["memory_mib", "deviation"])
def test_a_row_survives_the_file(tmp_path: Path, field: str) -> None:
    path = tmp_path / "r.csv"
    first = row(123.25, **{field: 2.5})
    write(path, first, row(0, timing=None, error="why"))
    assert [results.parse(record) for record in results.read(path)] == [first, row(0, timing=None, error="why")]


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    path, document = tmp_path / "r.csv", tmp_path / "doc.md"
    document.write_text(TEXT)
    write(path, row(400))
    arguments = ["--csv", str(path), "--document", str(document)]
    assert report.main([*arguments, "--check"]) == 1
    assert document.read_text() == TEXT
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    assert "400" in document.read_text()


def test_the_document_matches_the_results_in_the_repository() -> None:
    assert report.main(["--check"]) == 0, "run python -m bench.report"


def test_the_figures_on_top_of_the_document_are_in_its_tables() -> None:
    text = report.DOCUMENT.read_text()
    measured = set("".join(block[0] for block in report.BLOCK.finditer(text)).split())
    top = text.partition("<!-- bench:")[0]
    pairs = re.findall(r": ([\d,.]+) \([\w ]+ \**([\d,.]+x?)\**\)", top)  # ours, then that of another
    figures = [figure for pair in pairs for figure in pair]
    assert len(figures) > 10
    assert not set(figures) - measured, "the table on top quotes the tables below it"
