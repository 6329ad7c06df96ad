"""What the tuner tries, keeps and writes; the measuring itself needs a GPU and is replaced here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bench import candidates, tile_file, tune
from bench.candidates import Tiles, rows_of_expert, shared_bytes, stages, variants
from bench.case import Case
from bench.providers.ours import prepare_ours
from bench.shapes import find
from bench.timing import Call, Timing
from bench.tune import Tuner
from bench.tune_workers import Work
from moe_kernels import tiles as table
from moe_kernels.fitting import HOPPER_BYTES
from moe_kernels.tiles import Entry, load

TINY = Work(shape=find("tiny"), dtype="fp32", device="cpu")


@pytest.mark.parametrize("op", [op for op in tune.OPS if op not in tune.DECIDED])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-30b", "scattermoe"])
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_candidates_name_the_ops_arguments_and_fit_shared_memory(op: str, name: str, dtype: str) -> None:
    start = dict(table.tiles(op, shape={}, rows=8, dtype=dtype))
    shape = find(name)
    found = [variants(op, start, changes, shape, dtype) for changes in stages(op, shape, 8, dtype)]
    assert found[0], "the first stage must offer something"
    assert sum(map(len, found)) < 600, "compiling them takes too long"
    for tiles in (tiles for stage in found for tiles in stage):
        assert tiles.keys() == start.keys()
        assert shared_bytes(op, tiles, shape, dtype) <= HOPPER_BYTES


def test_shared_memory_by_hand() -> None:
    tiles = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 3}
    assert shared_bytes("large.in", tiles, find("mixtral"), "bf16") == 3 * (2 * 128 * 64 * 2 + 128 * 64 * 2)
    assert shared_bytes("large.down", tiles, find("mixtral"), "int4") == 3 * (128 * 64 / 2 + 128 * 64 * 2)
    assert shared_bytes("large.in", tiles, find("scattermoe"), "bf16") == 3 * 2 * 128 * 64 * 2
    assert shared_bytes("combine", {"BLOCK_D": 1024}, find("mixtral"), "bf16") == 0


def test_switches_turn_flags_on_or_off_and_int4_is_always_swapped() -> None:
    shape = find("mixtral")
    for before, after in ((0, 1), (1, 0)):
        best = {**table.tiles("small.in", shape={}, rows=8, dtype="bf16"), "PDL": before}
        (thrown,) = variants("small.in", best, [{"PDL": 1}], shape, "bf16")
        assert thrown == {**best, "PDL": after}
    start = dict(table.tiles("large.in", shape={}, rows=2048, dtype="int4"))
    found = variants("large.in", start, stages("large.in", shape, 2048, "int4")[0], shape, "int4")
    assert {tiles["SWAP"] for tiles in found} == {1}
    down = stages("large.down", shape, 2048, "bf16")[0]
    assert not any("BLOCK_M" in change for change in down), "the plan decides"


def test_regimes_worth_measuring() -> None:
    qwen = find("qwen3-30b")
    assert [candidates.regimes(qwen, rows) for rows in (1, 128, 257)] == [
        ["gemv", "small"],
        ["small", "large"],
        ["large"],
    ]
    assert [candidates.regimes(qwen, rows, "fp8")[-1] for rows in (4, 8, 2048)] == ["small", "rounded", "rounded"]
    assert rows_of_expert(qwen, 128) == 8


def test_a_search_keeps_the_fastest_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(_: Tuner, _case: Case, choices: Mapping[str, Tiles]) -> float:
        tiles = choices["combine"]
        return abs(tiles["BLOCK_D"] - 512) + tiles["num_warps"]

    monkeypatch.setattr(Tuner, "_time", cost)
    best, us = Tuner(TINY, None, 0.0).search("combine", 4, {})
    assert (best, us) == ({"BLOCK_D": 512, "num_warps": 1}, 1)


def test_a_fast_but_wrong_candidate_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(case: Case) -> Call:
        call = prepare_ours(case)
        wrong = table.tiles("combine", shape={}, rows=1, dtype="any")["BLOCK_D"] == 256
        return (lambda _: torch.zeros_like(case.x_TD)) if wrong else call

    def measured(_: Call, **__: object) -> Timing:
        us = float(table.tiles("combine", shape={}, rows=1, dtype="any")["BLOCK_D"])
        return Timing(p20=us, p50=us, p80=us, clock="host")

    monkeypatch.setattr(tune, "prepare_ours", prepare)
    monkeypatch.setattr(tune, "measure", measured)
    best, us = Tuner(TINY, None, 0.0).search("combine", 4, {})
    assert (best["BLOCK_D"], us) == (512, 512.0)


def test_a_later_search_of_the_same_rows_is_held_against_the_same_output(capsys: pytest.CaptureFixture[str]) -> None:
    tuner = Tuner(TINY, None, 0.0)
    for op in ("combine", "combine"):
        assert tuner.search(op, 4, {})[1] < float("inf")
    assert not capsys.readouterr().err


def test_a_switch_must_save_more_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for saved, wanted in ((0.995, 0), (0.98, 1)):
        monkeypatch.setattr(
            Tuner, "_time", lambda *call, saved=saved: 100.0 * (saved if call[2]["gemv"]["PDL"] else 1.0)
        )
        best, _ = Tuner(TINY, None, 0.0).search("gemv", 1, {})
        assert best["PDL"] == wanted


def test_the_regime_is_the_one_that_was_fastest() -> None:
    shape, small = find("qwen3-30b"), {"small.in": 9.0, "small.down": 2.0}
    assert tune._regime(shape, {"gemv": 1.0, **small})[0] == {"GEMV_ROWS": 16, "SMALL_ROWS": 256}
    assert tune._regime(shape, {"gemv": 3.0, **small})[0] == {"GEMV_ROWS": 0, "SMALL_ROWS": 256}
    large = {"small.down": 3.0, "large.down": 2.0, "combine": 0.1}
    assert tune._regime(shape, large) == ({"GEMV_ROWS": 0, "SMALL_ROWS": 0}, 2.0)
    assert tune._regime(shape, {"combine": 1.0})[1] == float("inf")


def test_rows_are_rounded_where_that_was_fastest() -> None:
    shape, others = find("qwen3-30b"), {"large.in": 4.0, "large.down": 3.0, "combine": 1.0}
    assert tune._decide("rounded_rows", shape, {**others, "rounded.down": 2.0}) == ({"FROM_ROWS": 1}, 2.0)
    assert tune._decide("rounded_rows", shape, {**others, "rounded.in": 5.0}) == ({"FROM_ROWS": 0}, 3.0)
    assert tune._decide("fused_moe", shape, {**others, "rounded.in": 2.0})[1] == 3.0
    assert tune._decide("rounded_rows", shape, {"rounded.in": 2.0})[1] == float("inf"), (
        "there is nothing to compare it with"
    )
    assert candidates.forced("rounded.in") == {"rounded_rows": {"FROM_ROWS": 1}}
    assert candidates.forced("small.in") == {
        "fused_moe": candidates.PRESETS["small"],
        "rounded_rows": {"FROM_ROWS": 0},
    }


def test_the_command_fills_a_table_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[tuple[str, int]] = []

    def search(_: Tuner, op: str, rows: int, _chosen: object) -> tuple[Tiles, float]:
        searched.append((op, rows))
        return dict(table.tiles(op, shape={}, rows=1, dtype="any")), 10.0 if op.startswith("small") else 20.0

    monkeypatch.setattr(Tuner, "search", search)
    (tmp_path / "default.json").write_text((table.DIRECTORY / "default.json").read_text())
    arguments = ["--shape", "tiny", "--rows", "1,8", "--dtype", "fp32", "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "gpu.json")]
    assert tune.main([*arguments, "--op", "small.in,small.down"]) == 0
    assert searched == [("small.in", 1), ("small.down", 1), ("small.in", 8), ("small.down", 8)]
    searched.clear()
    assert tune.main([*arguments, "--op", "small.in,small.down,combine,fused_moe"]) == 0
    # Only what is missing; the regime follows from the times that the table holds.
    assert searched == [("combine", 1), ("combine", 8)]
    assert dict(table.choose(load(tmp_path / "gpu.json"), "fused_moe", "fp32", (), 1).tiles) == {  # type: ignore[union-attr]
        "GEMV_ROWS": 0,
        "SMALL_ROWS": 1024,
    }
    assert tune.main([*arguments, "--op", "small.in,small.down,combine,fused_moe"]) == 0
    assert "all in the table" in capsys.readouterr().out
    entries = load(tmp_path / "gpu.json")
    ops = ("combine", "fused_moe", "small.down", "small.in")
    assert [(entry.op, entry.rows) for entry in entries] == [(op, rows) for op in ops for rows in (1, 8)]
    assert dict(entries[-1].shape) == {"d": 128, "f": 128, "E": 8, "k": 2, "gated": 2}
    assert entries[-1].us == 10.0


def test_out_of_time_stops_between_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--rows", "1", "--dtype", "fp32", "--device", "cpu", "--budget-s", "1e-9"]
    assert tune.main([*arguments, "--out", str(tmp_path / "gpu.json")]) == 0
    assert "out of time" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_new_entries_replace_old_ones_whatever_the_order_of_dimensions(tmp_path: Path) -> None:
    def entry(shape: tuple[tuple[str, int], ...], us: float) -> Entry:
        return Entry(op="combine", dtype="any", shape=shape, rows=1, tiles={"BLOCK_D": 1, "num_warps": 1}, us=us)

    old, new = entry((("d", 1), ("k", 2)), 5.0), entry((("k", 2), ("d", 1)), 4.0)
    other = entry((("d", 2), ("k", 2)), 6.0)
    assert tile_file.merged([old, other], [new]) == [new, other]
    (tmp_path / "default.json").write_text((table.DIRECTORY / "default.json").read_text())
    tile_file.write(tmp_path / "x.json", "GPU", [new, other])
    assert [found.us for found in tile_file.read(tmp_path / "x.json")] == [4.0, 6.0]
    assert len((tmp_path / "x.json").read_text().splitlines()) == 7
