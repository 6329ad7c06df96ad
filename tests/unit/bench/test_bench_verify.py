"""bench.verify on a CPU, where the kernels run in the interpreter; and that it sees what it should see."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench import verify
from bench.checks import all_checks
from bench.checks.base import Check, share
from bench.verify import Outcome

FEW = [
    "route mixtral rows 64",
    "plan capacity rows 64 experts 8",
    "plan local rows 3",
    "fused_moe tiny fp32 fp32 rows 7",
    "grouped_mlp tiny",
    "parallel_linear grouped to token fp32 rows 5",
    "sparse_mlp swiglu fp32 rows 5",
    "quantise",
    "no rows",
    "attention 12-2-96 fp32 mix window",
    "attention neighbours fp32",
    "attention graph fp32",
    "latents 6-odd fp16 long and short",
    "latents 22 bf16 decodes",
    "latents graph fp32",
    "add_rms_norm fp16 100 rows 17",
    "qk_norm_rope odd fp16 rows 17",
    "qk_norm_rope odd interleaved fp16 rows 17",
    "chain fp32 rows 1",
]


def test_a_few_checks_of_every_kind_pass(capsys: pytest.CaptureFixture[str]) -> None:
    only = [part for text in FEW for part in ("--only", text)]
    code = verify.main(["--device", "cpu", "--jobs", "1", *only])
    out = capsys.readouterr().out
    assert code == 0, out
    ops = ("route", "plan", "fused_moe", "grouped_mlp", "parallel_linear", "sparse_mlp", "quantise", "attention")
    for kind in (*ops, "latents"):
        assert f"| {kind} " in out
    assert " 0 failed" in out


def test_names_are_unique_and_cover_every_shape_and_dtype() -> None:
    names = [check.name for check in all_checks()]
    assert len(set(names)) == len(names)
    for shape in ("mixtral", "qwen3-30b", "olmoe", "deepseek-v3", "glm-4.5-air", "scattermoe", "expertflow", "ds-1.3b"):
        for dtype in ("bf16", "fp16", "int8", "int8_channel", "int4", "int4_channel"):
            assert any(f"fused_moe {shape}" in name and f" {dtype} " in name for name in names), (shape, dtype)


def test_checks_can_be_sent_to_another_process() -> None:
    import pickle

    for check in all_checks():
        assert pickle.loads(pickle.dumps(check)).name == check.name


def _returns(value: float, _device: str) -> float:
    return value


def _raises(_device: str) -> float:
    raise RuntimeError("kernel\nexploded")


def test_a_failure_is_named_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checks(**_: object) -> list[Check]:
        runs = {"good": partial(_returns, 0.5), "off": partial(_returns, 1.5), "nan": partial(_returns, float("nan"))}
        return [Check(name=f"{name} case", key=name, run=run) for name, run in {**runs, "bad": _raises}.items()]

    monkeypatch.setattr(verify, "all_checks", checks)
    assert verify.main(["--device", "cpu", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "FAILED off case: 1.5 times the tolerance" in out
    assert "FAILED nan case" in out
    assert "FAILED bad case: RuntimeError: kernel exploded (_raises:" in out
    assert "4 checks, 3 failed" in out
    assert verify.main(["--device", "cpu", "--only", "good"]) == 0


def test_deviations_are_shares_of_the_dtypes_tolerance() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert share(expected + torch.tensor([0.0, 0.05]), expected, torch.bfloat16) == pytest.approx(1.0, rel=1e-4)
    assert share(expected, expected, torch.float32) == 0.0


@pytest.mark.parametrize("found", [[3.0, torch.nan], [3.0, torch.inf], [3.0]])
def test_unwritten_elements_and_wrong_shapes_are_failures(found: list[float]) -> None:
    with pytest.raises(AssertionError, match=r"not written|shape"):
        share(torch.tensor(found), torch.tensor([3.0, 4.0]), torch.bfloat16)


def test_nan_is_right_where_the_twin_has_it() -> None:
    both = torch.tensor([torch.nan, 4.0])
    assert share(both, both, torch.float32) == 0.0
    assert Outcome(name="x", share=float("nan")).failed


def test_without_interpreter_or_gpu_it_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify.backend, "INTERPRETED", False)
    assert verify.main(["--device", "cpu"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
    # Names need neither.
    assert verify.main(["--device", "cpu", "--list", "--only", "route mixtral rows 64"]) == 0
    assert "route mixtral rows 64" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("route mixtrl rows 64", "near it: route mixtral rows 64"),
        ("FusedMoe", "near it: fused_moe "),
        ("xyzzy", "names begin with "),
        ("one two three four five six seven eight nine ten eleven", "names begin with "),
    ],
)
def test_a_name_that_matches_nothing_is_answered_with_what_is_near(
    text: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A second one that matches must not hide it.
    assert verify.main(["--device", "cpu", "--list", "--only", "quantise", "--only", text]) == 2
    said = capsys.readouterr()
    assert f"--only {text!r} matches nothing; {hint}" in said.err
    assert "quantise" not in said.out
