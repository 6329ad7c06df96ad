"""`expertmesh plan`: what it says of shapes that leave no choice, and of input that cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from testkit.pocket.answers import POCKET

from services.cli.main import main

MODEL = str(POCKET / "model")


@pytest.fixture
def big(tmp_path: Path) -> str:
    """Qwen3-30B-A3B's shapes: 58 GB of experts at 16 bits."""
    config = json.loads((POCKET / "model/config.json").read_text())
    shapes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    attention = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | shapes | attention))
    return str(tmp_path / "config.json")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `expertmesh plan` says with ``words``; it must end with one of ``codes``."""

    def run(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        assert main(["plan", *words]) in codes
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def test_one_gpu_runs_all_in_one(said: Callable[..., str]) -> None:
    text = said("--model", MODEL, "--gpus", "1", "--tokens", "64")
    assert f"Run: expertmesh serve --model {MODEL}\n" in text
    assert "none of the three; 1 blocks of experts" in text


def test_experts_that_fit_no_gpu_are_shared(said: Callable[..., str], big: str) -> None:
    text = said("--model", big, "--gpus", "2", "--gpu", "l40s", "--tokens", "8", "--link-us", "1")
    assert "co-located by 2" in text
    assert f"Run: expertmesh serve --model {big} --layout colocated --workers 2\n" in text
    nodes = ("--gpus", "2", "--nodes", "2", "--gpu", "l40s", "--tokens", "8", "--link-us", "1", "--across-us", "1")
    text = said("--model", big, *nodes)
    assert "2 x `expertmesh attention --layout lockstep --workers 2" in text, "nothing is shared across nodes"


def colocated_us(text: str, tokens: int) -> float:
    [found] = re.findall(rf"│ +{tokens} │ +([0-9.]+) │", text)
    return float(found)


def test_the_estimate_is_of_the_layout_that_is_named(said: Callable[..., str], big: str) -> None:
    """GPUs of one node that share experts have seats, those of several nodes are in lock-step."""
    words = ("--model", big, "--gpu", "l40s")
    serve = f"Run: expertmesh serve --model {big} --layout colocated"
    alone = said(*words, "--gpus", "4", "--tokens", "8")
    text = said(*words, "--gpus", "8", "--nodes", "2", "--tokens", "16", "--across-us", "50000")
    assert colocated_us(text, 16) == colocated_us(alone, 8), "no row of a copy leaves its node"
    assert f"{serve} --workers 4 --expert-groups 2, on each of 2 nodes\n" in text
    text = said(*words, "--gpus", "4", "--nodes", "2", "--tokens", "16", "--across-us", "50000")
    assert f"{serve} --workers 2, on each of 2 nodes\n" in text
    text = said(*words, "--gpus", "2", "--nodes", "2", "--tokens", "8", "--across-us", "1")
    assert colocated_us(text, 8) > 2 * 2500, "lock-step's latency, there and back"
    assert "Run: 2 x `expertmesh attention --layout lockstep --workers 2" in text
    fast = ("--across-us", "1", "--lockstep-us", "1", "--across-gb", "1")
    text = said(*words, "--gpus", "4", "--nodes", "4", "--tokens", "1", *fast)
    assert "Run: 2 times 2 x `expertmesh attention --layout lockstep --workers 2" in text


def test_across_nodes_it_compares_both_exchanges(said: Callable[..., str], big: str) -> None:
    words = ("--gpus", "16", "--nodes", "4", "--tokens", "16,65536", "--batches", "32", "--block", "8")
    text = said("--model", big, *words)
    assert "16 tokens a step across 4 nodes" in text
    assert text.count("25% of the messages") == 2
    assert "us flat" in text
    assert "hierarchical." in text
    assert "P = 32, D = 16, E_block = 8: data parallelism, expert parallelism, pipelining; 16 blocks" in text


def test_it_says_what_it_assumes_and_how_far_off_it_was(said: Callable[..., str], big: str) -> None:
    text = said("--model", big, "--gpus", "4", "--tokens", "32", "--context", "77", "--link-us", "9")
    assert "microseconds a layer, estimated" in text
    assert "These are estimates: within 25% of 20 layer times measured on 4 H200 of one node" in text
    assert "h200 reaches 4.30 TB/s and 790 Tflop/s (measured; kernels/bench/floors.py)" in text
    assert "shared memory in 9 us + bytes at 295 GB/s one way (ADR 5)" in text
    assert "77 tokens of context" in text
    assert "by seats that share memory, too" in text
    assert "nothing was measured of other splits.\n" in text
    text = said("--model", big, "--gpus", "4", "--gpu", "h100", "--nodes", "2", "--weight-bits", "8")
    assert "nothing was measured of other splits, the h100, 8-bit weights, several nodes.\n" in text
    assert "a guess: set --across-us, --across-gb" in text
    assert "by lock-step over NCCL, 5,000 us a layer" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpus", "2"], "required: --model"),
        (["--model", "/nowhere", "--gpus", "2"], "/nowhere is no folder"),
        (["--model", MODEL, "--gpus", "3", "--nodes", "2"], "3 GPUs cannot be spread evenly over 2 nodes"),
        (["--model", MODEL, "--gpus", "0"], "0 GPUs cannot be spread"),
        (["--model", MODEL, "--gpus", "2", "--gpu", "b9"], "Known: a100, h100, h200, l40s"),
        (["--model", MODEL, "--gpus", "2", "--tokens", "4,q"], "no list of whole numbers"),
        (["--model", MODEL, "--gpus", "2", "--tokens", "0"], "tokens = 0"),
        (["--model", MODEL, "--gpus", "2", "--skew", "-1"], "skew = -1.0"),
        (["--model", MODEL, "--gpus", "2", "--weight-bits", "7"], "7 bits"),
        (["--model", MODEL, "--gpus", "2", "--link-gb", "0"], "bandwidth = 0.0"),
        (["--model", MODEL, "--gpus", "2", "--nodes", "2", "--across-gb", "0"], "across_bandwidth = 0.0"),
    ],
)
def test_bad_input(said: Callable[..., str], words: list[str], problem: str) -> None:
    text = said(*words, codes=(2, 3))
    assert problem in text


def test_weights_that_fit_in_no_way(said: Callable[..., str], big: str) -> None:
    text = said("--model", big, "--gpus", "1", "--gpu", "l40s", codes=(2,))
    assert "cannot hold the model" in text
