"""The bench end to end on a CPU: tables, CSV, plots, suites, and how failures show."""

from __future__ import annotations

import csv
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from testkit.pictures import texts
from torch import Tensor

from bench import plot, render, results, run
from bench.bank import QUANTISED, Bank
from bench.case import Case, checked_rows, make
from bench.draws import uniform
from bench.machine import Machine
from bench.measuring import Settings, measure_case
from bench.precompile import Task, run_once
from bench.providers import PROVIDERS, vllm, vllm_mxfp4
from bench.results import COLUMNS, Row
from bench.shapes import find
from bench.suites import SUITES
from bench.timing import Call, Timing, copies_for
from moe_kernels.quant.op import dequantize_experts, quantize_experts

MACHINE = Machine(gpu="G", torch="2", triton="3", vllm="", date="2026-11-21", commit="abc")
CPU = Settings(device="cpu", budget_s=0.0, scale=32, tokens=8, suite="test")


def row(provider: str = "ours", p50: float = 20.0, rows: int = 8, clock: str = "graph", **fields: object) -> Row:
    timing = Timing(p20=p50 * 0.9, p50=p50, p80=p50 * 1.1, clock=clock)  # type: ignore[arg-type]
    base = {"suite": "s", "op": "fused_moe", "shape": "tiny", "dtype": "bf16", "floor_us": 15.0, "timing": timing}
    return Row(provider=provider, rows=rows, **{**base, **fields})  # type: ignore[arg-type]


def case_of(rows: int, dtype: str = "fp32") -> Case:
    bank = Bank(find("tiny"), "cpu", activation_dtype="fp32")
    return make("fused_moe", find("tiny"), rows, dtype, bank, uniform(rows, 8, 2))


def test_every_op_and_provider_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = ["fused_moe", "grouped_mlp", "parallel_linear", "route", "plan", "route_plan"]
    names = ["ours", "ours_weight_only", "vllm", "vllm_marlin", "vllm_fp8", "grouped_mm", "torch"]
    path = tmp_path / "deep" / "results.csv"
    arguments = ["--op", ",".join(ops), "--shape", "tiny", "--rows", "1,4", "--dtype", "fp32,int4", "--device", "cpu"]
    arguments += ["--provider", ",".join(names), "--csv", str(path), "--plot", str(tmp_path), "--budget-s", "1e-3"]
    assert run.main([*arguments, "--quiet"]) == 0
    records = list(results.read(path))
    assert len(records) == len(ops) * 2 * 2 * len(names)
    assert set(records[0]) == set(COLUMNS)
    for record in records:
        if record["provider"].startswith(("vllm", "ours_weight_only")):
            assert record["error"].startswith("unsupported"), record
            assert not record["p50_us"]
        elif record["dtype"] == "fp32":
            assert float(record["p20_us"]) <= float(record["p50_us"]) <= float(record["p80_us"])
            # Without a GPU a share of an H200's floor would mislead.
            assert (record["clock"], record["percent"], record["error"]) == ("host", "", "")
    out = capsys.readouterr().out
    assert "| fused_moe" in out
    assert " cpu" in out
    assert "vllm: fused_moe tiny fp32 rows 1: unsupported" in out
    assert {"fused_moe tiny fp32", "ours", "grouped_mm"} <= set(
        texts((tmp_path / "fused_moe-tiny-fp32.svg").read_text())
    )


def test_appending_keeps_what_was_there_and_writes_one_header(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    results.append(path, [row()], MACHINE)
    results.append(path, [row(provider="vllm", timing=None, error="Broken:\n no  luck")], MACHINE)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    first, second = csv.DictReader(lines)
    assert (first["p50_us"], first["floor_us"], first["percent"], first["commit"]) == ("20", "15", "75", "abc")
    assert (second["p50_us"], second["error"]) == ("", "Broken: no luck")


def test_the_table_shows_share_of_floor_clock_peers_and_each_error_once() -> None:
    rows = [
        row(),
        row("vllm", 30.0),
        row("torch", 1.0, clock="events"),
        row("grouped_mm", timing=None, error="X: y"),
        row("grouped_mm", timing=None, error="X: y", rows=9),
    ]
    text = render.side_by_side(rows)
    assert text.startswith("All lines: op fused_moe, shape tiny, dtype bf16.\n\n| rows | floor us ")
    cells = [cell.strip() for cell in text.splitlines()[4].split("|")]
    # The plain-torch reference is no peer: 30 / 20.
    assert cells[1:-1] == ["8", "15.0", "20.0 (75 %)", "30.0 (50 %)", "1.00 (1500 %) e", "1.50"]
    assert text.count("X: y") == 1


def test_a_provider_that_fails_is_a_row_and_not_the_end() -> None:
    def broken(_: object) -> Call:
        raise RuntimeError("CUDA said no")

    rows = list(measure_case(case_of(4), {"peer": broken, "ours": PROVIDERS["ours"]}, CPU))
    assert (rows[0].timing, rows[0].error) == (None, "RuntimeError: CUDA said no")
    assert rows[1].timing is not None


@pytest.mark.parametrize(
    ("rows", "harm", "error"),
    [
        pytest.param(20, lambda y, _: y.index_fill(0, torch.tensor([1]), torch.nan), "wrong: deviates", id="nan"),
        pytest.param(20, lambda y, _: y.index_fill(0, torch.tensor([1]), torch.inf), "wrong: deviates", id="inf"),
        pytest.param(20, lambda y, _: y.index_fill(0, torch.tensor([3]), 0.0), "wrong: deviates", id="unwritten"),
        pytest.param(4, lambda y, nth: y if nth == 1 else 0 * y, "wrong: deviates by 1 ", id="right the first time"),
    ],
)
def test_a_wrong_or_unwritten_output_has_no_time(rows: int, harm: Callable[[object, int], object], error: str) -> None:
    # Of 20 rows row 1 is none of those that are recomputed, row 3 is.
    assert checked_rows(20) == [0, 3, 7, 11, 15, 19]

    def broken(case: Case) -> Call:
        call, calls = PROVIDERS["ours"](case), itertools.count(1)
        return lambda number: harm(call(number), next(calls))

    (found,) = measure_case(case_of(rows), {"peer": broken}, CPU)
    assert found.timing is None
    assert found.error.startswith(error)


@pytest.mark.parametrize("dtype", ["fp32", *QUANTISED])
def test_providers_agree_with_the_float32_reference(dtype: str) -> None:
    names = ["ours", "grouped_mm", "torch", "transformers"] if dtype == "fp32" else ["ours", "torch"]
    rows = list(measure_case(case_of(9, dtype), {name: PROVIDERS[name] for name in names}, CPU))
    assert [found.provider for found in rows] == names
    for found in rows:
        assert not found.error
        assert found.deviation is not None
        assert found.deviation < 1e-5, found.provider


def test_checked_rows_reach_from_the_first_to_the_last() -> None:
    assert checked_rows(11) == [0, 2, 4, 6, 8, 10]
    assert checked_rows(1) == [0]
    assert checked_rows(3) == [0, 1, 2]


def test_weights_rotate_past_the_cache_but_within_memory() -> None:
    assert copies_for(19.5e6, 311e6, 140e9) == 13
    assert copies_for(705e6, 2.8e9, 140e9) == 2
    assert copies_for(1e6, 22.5e9, 140e9) == 2
    assert copies_for(1e6, 90e9, 140e9) == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_marlins_words_hold_our_codes_in_order(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize_experts(torch.randn(1, 16, 256, generator=generator), bits, 128)
    words = vllm.gptq_words(weight.packed[0], bits)
    per_word = 32 // bits
    assert words.shape == (256 // per_word, 16)
    scale = weight.scales[0].float().repeat_interleave(128, dim=1)
    codes = (dequantize_experts(weight)[0] / scale).round().int() + 2 ** (bits - 1)
    for column in (0, 1, 63, 64, 130, 255):
        word = words[column // per_word] >> (bits * (column % per_word))
        assert (word & (2**bits - 1)).tolist() == codes[:, column].tolist()


def test_mxfp4_peers_get_our_codes_as_checkpoints_hold_them_and_filled_up() -> None:
    generator = torch.Generator().manual_seed(0)
    floats = [torch.randn(2, *size, generator=generator) for size in ((320, 288), (288, 160))]
    w_in, w_down = (quantize_experts(weight, 4, 32, codes="e2m1") for weight in floats)
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(2).long()
        return values[pairs] * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=2)

    gate_up, down, s_in, s_down = vllm_mxfp4.padded_layer(w_in, w_down)
    assert gate_up.shape == (2, 512, 256)
    assert down.shape == (2, 512, 128)
    whole = torch.zeros(2, 2, 256, 512)
    whole[:, :, :160, :288] = dequantize_experts(w_in).view(2, 2, 160, 288)
    assert torch.equal(numbers(gate_up, s_in), whole.flatten(1, 2))
    assert torch.equal(numbers(down, s_down)[:, :288, :160], dequantize_experts(w_down))
    assert not numbers(down, s_down)[:, 288:].any()


@pytest.mark.parametrize(
    "name", [name for name in SUITES if name not in ("elephants-table1", "int4", "figures", "formats")]
)
def test_suites_run_at_reduced_size(name: str) -> None:
    rows = list(SUITES[name](CPU))
    assert rows
    assert not [found.error for found in rows if found.error and not found.error.startswith("unsupported")]
    assert any(found.timing for found in rows if found.provider == "ours")
    assert all(found.floor_us > 0 for found in rows)


def test_the_suite_for_elephants_table_1_runs_its_kernel_in_the_interpreter() -> None:
    from bench.suites.elephants import COLUMNS as KINDS
    from bench.suites.elephants import SHAPE, _convert_call

    for bits, native in KINDS.values():
        # Raises if the kernel's output differs from float32.
        assert _convert_call(SHAPE.scaled(8), 2, bits, native, 1, CPU)(0) is not None


def test_gating_by_table_and_by_einsum_give_the_same_tokens() -> None:
    from bench.suites import deepspeed

    shape = find("tiny")
    x = torch.randn(40, shape.d, generator=torch.Generator().manual_seed(0))
    logits = torch.randn(40, shape.E, generator=torch.Generator().manual_seed(1))
    table, einsum = deepspeed.by_table(x, logits, shape), deepspeed.by_einsum(x, logits, shape)
    torch.testing.assert_close(table, einsum)
    dropped = int((table.abs().sum(1) == 0).sum())
    # Capacity 7 of 8 experts for 40 tokens: this draw overflows some.
    assert 0 < dropped < 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--scale 2 --op route", "--scale without --suite: --scale, --tokens belong to a suite"),
        ("--tokens 8", "--tokens without --suite"),
        ("--suite figures --rows 1 --op route", "--op, --rows with --suite"),
        ("--suite figures --shape tiny", "--op, --shape, --rows, --dtype, --provider to a run without one"),
        ("--suite figures --dtype bf16", "--dtype with --suite"),
        ("--suite figures --provider ours", "--provider with --suite"),
        ("--rows 1 --csv FILE/r.csv", "cannot write what --csv or --plot names"),
        ("--rows 1 --csv FOLDER", "cannot write what --csv or --plot names"),
        ("--rows 1 --plot FILE/plots", "cannot write what --csv or --plot names"),
    ],
)
def test_what_would_be_ignored_or_could_not_be_written_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    text = text.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        run.main(["--device", "cpu", *text.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_cpu_records_nothing_unless_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = tmp_path / "committed.csv"
    monkeypatch.setattr(results, "DEFAULT_CSV", committed)
    arguments = ["--op", "plan", "--shape", "tiny", "--rows", "1", "--dtype", "fp32", "--provider", "torch"]
    arguments += ["--device", "cpu", "--budget-s", "1e-3"]
    assert run.main(arguments) == 0
    assert "nothing is recorded unless --csv" in capsys.readouterr().err
    assert not committed.exists()
    assert run.main([*arguments, "--csv", str(tmp_path / "mine.csv")]) == 0
    assert "nothing is recorded" not in capsys.readouterr().err
    assert len(list(results.read(tmp_path / "mine.csv"))) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run._parse(["--device", "cuda"]).csv == committed


def test_plots_need_two_points(tmp_path: Path) -> None:
    assert plot.write([row(), row("vllm", 30.0)], tmp_path) == []
    (path,) = plot.write([row(), row(rows=64, p50=900.0), row("vllm", rows=64)], tmp_path)
    assert {"fused_moe tiny bf16", "rows", "median microseconds of a call", "floor", "ours", "vllm"} <= set(
        texts(path.read_text())
    )


def test_all_medians_of_a_plot_are_shown_over_their_rows() -> None:
    lines = plot.lines_of([row(), row(rows=64, p50=900.0), row("vllm", 30.0), row("vllm", timing=None, rows=64)])
    (axes,) = inspect.unwrap(plot.over_rows)("title", lines).axes
    shown = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert shown == {"floor": [[8, 15], [64, 15]], "ours": [[8, 20], [64, 900]], "vllm": [[8, 30]]}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        run.main(["--device", "cpu", "--plot", str(tmp_path)])
    assert "pip install -e '.[plots]'" in capsys.readouterr().err


def test_kernels_can_be_compiled_ahead_in_other_processes(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--rows", "1,2", "--dtype", "fp32", "--device", "cpu", "--provider", "ours,torch"]
    assert run.main([*arguments, "--jobs", "2", "--csv", str(tmp_path / "r.csv"), "--budget-s", "1e-3", "--quiet"]) == 0
    assert [record["error"] for record in results.read(tmp_path / "r.csv")] == [""] * 4


def test_a_task_that_fails_while_compiling_is_left_to_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def provider(name: str) -> Callable[[Case], Callable[[int], Tensor]]:
        def call(_: int) -> Tensor:
            called.append(name)
            if name == "fails":
                raise RuntimeError("it does not compile")
            return torch.zeros(1)

        return lambda _: call

    for name in ("fails", "works"):
        monkeypatch.setitem(PROVIDERS, name, provider(name))
    task = Task(op="fused_moe", shape=find("tiny"), rows=1, dtype="fp32", provider="fails", device="cpu")
    run_once([task, replace(task, provider="works")])
    assert called == ["fails", "works"]
