"""`expertmesh bench` as a user runs it, on the pocket model, alone and beside a vLLM that has no model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testkit.fake_vllm import python_with_vllm

POCKET = str(Path(__file__).parents[2] / "examples/pocket-moe/model")
Bench = Callable[..., tuple[dict[str, Any], str]]

pytestmark = pytest.mark.alone


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Runs it with ``words``, and returns its results and its table."""

    def ran(kind: str, *words: str, model: str = POCKET) -> tuple[dict[str, Any], str]:
        file, picture = tmp_path / "found.json", tmp_path / "found.svg"
        env = {key: value for key, value in os.environ.items() if not key.startswith("EXPERTMESH_")}
        command = [sys.executable, "-m", "expertmesh", "bench", kind, model, *words, "--threads", "1"]
        ended = subprocess.run(
            [*command, "--json", str(file), "--picture", str(picture)],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert picture.read_text().startswith("<svg ")
        found: dict[str, Any] = json.loads(file.read_bytes())
        assert {"version", "commit", "environment", "options", "seed", "sides", "samples", "figures"} <= found.keys()
        assert found["kind"] == kind
        assert not found["cut_short"]
        return found, ended.stdout

    return ran


def sides(found: dict[str, Any]) -> list[str]:
    assert [each["side"] for each in found["samples"]] == sorted(each["side"] for each in found["samples"])
    return list(found["sides"])


def test_latency_beside_vllm_counts_every_token(bench: Bench, tmp_path: Path) -> None:
    words = ["--batch-size", "1,3", "--input-len", "1", "--output-len", "4", "--num-iters", "2"]
    found, table = bench("latency", *words, "--against", "vllm", "--vllm", str(python_with_vllm(tmp_path)))
    assert sides(found) == ["expertmesh", "vLLM"]
    assert [(each["side"], each["batch"], each["output_tokens"]) for each in found["samples"]] == [
        (side, batch, 5 * batch) for side in ("expertmesh", "vLLM") for batch in (1, 3) for _ in range(2)
    ]
    ours = [each for each in found["samples"] if each["side"] == "expertmesh"]
    assert [len(each["step_ms"]) for each in ours] == [3] * 4, "each of the steps that decode the whole batch"
    assert found["sides"]["expertmesh"]["torch"]
    assert found["sides"]["vLLM"]["dtype"] == found["sides"]["expertmesh"]["dtype"] == "bfloat16"
    assert found["sides"]["vLLM"]["enable_prefix_caching"] is False, "each round has the same prompts"
    assert "expertmesh / vLLM" in table
    assert len(found["figures"]) == 6
    for figure in found["figures"]:
        assert len(figure["sides"]["expertmesh"]["samples"]) == 2
        assert figure["ratio"] is not None


def test_throughput_without_weights_gives_what_was_asked_for(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(Path(POCKET) / "config.json", tmp_path / "model")
    words = ["--num-prompts", "12", "--input-len", "5..9", "--output-len", "3", "--num-warmups", "0"]
    found, table = bench("throughput", *words, "--num-iters", "2", "--load-format", "dummy", model="./model")
    assert sides(found) == ["expertmesh"]
    for number, sample in enumerate(found["samples"]):
        assert sample["number"] == number
        assert sample["requests"] == len(sample["finished_s"]) == 12
        assert sample["output_tokens"] == 36
        assert 60 <= sample["input_tokens"] <= 108
        assert 0 < sample["finished_s"][-1] <= sample["seconds"]
    assert "output tokens" in table


def test_serve_beside_vllm_sends_both_the_same(bench: Bench, tmp_path: Path) -> None:
    words = ["--num-prompts", "10", "--request-rate", "inf", "--input-len", "6", "--output-len", "5"]
    beside = ["--against", "vllm", "--vllm", str(python_with_vllm(tmp_path))]
    found, table = bench("serve", *words, *beside, "--goodput", "e2el:300000")
    assert sides(found) == ["expertmesh", "vLLM"]
    for sample in found["samples"]:
        assert sample["run"]["counts"]["ok"] == sample["run"]["counts"]["scheduled"] == 10
        assert sample["run"]["validity"]["valid"]
        assert [each["output_tokens"] for each in sample["requests"]] == [5] * 10
        assert sample["run"]["rates"]["goodput"] == pytest.approx(sample["run"]["rates"]["requests"])
    assert [each["prompt_tokens"] for each in found["samples"][0]["requests"]] == [6] * 10
    assert found["verdicts"].keys() == found["sides"].keys()
    assert "goodput" in table
