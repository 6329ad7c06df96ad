"""`expertmesh plan`: the layout that it recommends, its figures, the command, and input that cannot be."""

from __future__ import annotations

import csv
import json
import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from testkit.pocket.answers import POCKET

from services.attention.setup.remote_link import SHARED_ROWS as SERVERS_ROWS
from services.cli.main import main
from services.config import Settings, load_settings, require
from services.model.load_spec import load_spec
from services.model.state_room import state_nbytes, state_room
from services.placement.planning.layer_times import between_points
from services.planner.estimate import row
from services.planner.figures import EXPERT_TIMES, SHARED_ROWS, STEP_MARGIN
from services.supervisor.gpus import Gpus
from services.supervisor.preflight import preflight

ROOT = Path(__file__).parents[3]
MODEL = str(POCKET / "model")
QWEN3_30B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8} | {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
OLMOE = QWEN3_30B | {
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50_304,
}
QWEN2_MOE = {
    "model_type": "qwen2_moe",
    "num_key_value_heads": 16,
    "vocab_size": 151_936,
    "max_position_embeddings": 8192,
    "decoder_sparse_step": 1,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
}
GLM4 = {
    "model_type": "glm4_moe",
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 151_552,
    "max_position_embeddings": 131_072,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
EXAMPLES = {
    "OLMoE-1B-7B": OLMOE | {"model_type": "olmoe", "intermediate_size": 1024},
    "Qwen1.5-MoE-A2.7B": QWEN2_MOE
    | {"hidden_size": 2048, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 16},
    "Qwen2-57B-A14B": QWEN2_MOE
    | {"hidden_size": 3584, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20_480}
    | {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4},
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-235B-A22B": QWEN3_30B
    | {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64},
    "Mixtral-8x7B": MIXTRAL
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Mixtral-8x22B": MIXTRAL
    | {"hidden_size": 6144, "intermediate_size": 16_384, "num_hidden_layers": 56, "num_attention_heads": 48},
    "GLM-4.5-Air": GLM4
    | {"hidden_size": 4096, "moe_intermediate_size": 1408, "intermediate_size": 10_944, "num_hidden_layers": 46}
    | {"n_routed_experts": 128, "first_k_dense_replace": 1},
    "GLM-4.6": GLM4
    | {"hidden_size": 5120, "moe_intermediate_size": 1536, "intermediate_size": 12_288, "num_hidden_layers": 92}
    | {"n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True},
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 200_064,
        "max_position_embeddings": 196_608,
        "tie_word_embeddings": False,
    },
    "ERNIE-4.5-21B-A3B": {
        "model_type": "ernie4_5_moe",
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_num_experts": 64,
        "moe_k": 6,
        "vocab_size": 103_424,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "DeepSeek-V3 in FP8": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
}
"""Shapes of the examples in the README, of their config.json."""


def config_of(folder: Path, shapes: dict[str, Any]) -> Path:
    config = json.loads((POCKET / "model/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | shapes))
    return folder


@pytest.fixture
def big(tmp_path: Path) -> str:
    """Qwen3-30B-A3B's config.json: 61 GB of weights at 16 bits."""
    return str(config_of(tmp_path, QWEN3_30B))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What `expertmesh plan` says with ``words`` on a wide terminal; it must end with one of ``codes``."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*words: str, codes: tuple[int, ...] = (0,)) -> str:
        assert main(["plan", *words]) in codes
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def run_line(text: str) -> list[str]:
    """The words of the command."""
    [line] = [line for line in text.splitlines() if line.startswith("  ")]
    return shlex.split(line)


def served(text: str) -> Settings:
    """What `expertmesh serve` makes of the command, which it must not refuse."""
    words = run_line(text)
    assert words[:2] == ["expertmesh", "serve"]
    settings = load_settings(words[2:])
    require(settings, None)
    return settings


def table(text: str) -> dict[int, list[str]]:
    """Batch size -> the other cells of its row."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]
    return {int(batch.replace(",", "")): cells for batch, *cells in rows}


def test_one_gpu_runs_all(said: Callable[..., str]) -> None:
    text = said("--model", MODEL, "--gpus", "1", "--tokens", "64")
    settings = served(text)
    assert (settings.model, settings.layout, settings.workers, settings.max_num_seqs) == (Path(MODEL), "local", 1, 64)
    seen = preflight(settings, lambda: Gpus(names=("H200",)))
    assert seen.room.kv_tokens >= 64 * 1024
    assert "One GPU does all." in text
    assert "The GPU has 0.0219 GB of weights" in text
    assert "--tokens N" not in text, "there is no other batch"


def test_the_command_is_that_of_the_row_with_the_most_tokens(said: Callable[..., str], big: str) -> None:
    text = said(big, "--gpus", "4", "--tokens", "32,256,2048,65536")
    rows = table(text)
    assert rows.pop(65_536) == ["-", "-", "does not fit"]
    [best] = [batch for batch, cells in rows.items() if cells[-1].endswith("*")]
    rates = {batch: [int(cell.replace(",", "")) for cell in cells[:-1] if cell != "-"] for batch, cells in rows.items()}
    assert max(rates[best]) == max(rate for those in rates.values() for rate in those)
    for batch, cells in rows.items():
        assert ("disaggregated" in cells[-1]) == (rates[batch].index(max(rates[batch])) == 1)
    layout = rows[best][-1].rstrip(" *")
    assert f"* Recommended for a batch of {best:,}: {layout}. Expect {max(rates[best]):,} tokens/s" in text
    assert "Prompts are not counted" in text  # whoever sizes a fleet by these rates alone takes too few GPUs
    settings = served(text)
    assert (settings.layout, settings.workers * settings.max_num_seqs) == ("local", best)


@pytest.mark.parametrize(
    ("words", "layout", "workers", "experts", "groups"),
    [
        (("--gpus", "2", "--gpu", "l40s", "--tokens", "8"), "colocated", 2, None, 2),
        (("--gpus", "4", "--gpu", "l40s", "--tokens", "8", "--link-us", "1"), "colocated", 4, None, 2),
        (("--gpus", "4", "--tokens", "128"), "disaggregated", 1, 3, 3),
        (("--gpus", "4", "--tokens", "2048"), "local", 4, None, None),
    ],
)
def test_serve_takes_the_command(
    said: Callable[..., str],
    big: str,
    words: tuple[str, ...],
    layout: str,
    workers: int,
    experts: int | None,
    groups: int | None,
) -> None:
    settings = served(said(big, *words))
    assert (settings.layout, settings.workers, settings.expert_workers) == (layout, workers, experts)
    assert settings.expert_groups == groups
    assert settings.max_num_batched_tokens == settings.max_num_seqs + 2048, "decodes go first, and leave prompts room"


def test_steps_with_prompts_leave_shared_memory_where_experts_are_apart(said: Callable[..., str], big: str) -> None:
    words = (big, "--gpus", "4", "--tokens")
    assert "Steps of more than 512 tokens go to experts by NCCL or TCP" in said(*words, "128"), "disaggregated"
    assert "go to experts by NCCL" not in said(*words, "2048"), "local"


def test_weights_of_32_bits_are_served_with_the_16_that_are_planned(said: Callable[..., str], tmp_path: Path) -> None:
    text = said(str(config_of(tmp_path, QWEN3_30B | {"dtype": "float32"})), "--gpus", "1", "--tokens", "8")
    assert "61.1 GB in bfloat16" in text
    assert served(text).dtype == "bfloat16"


def test_memory_is_what_fits(said: Callable[..., str], big: str) -> None:
    """98,304 bytes of keys and values for each token, and 16 tokens in a block."""
    text = said(big, "--gpus", "4", "--tokens", "128", "--context", "1000")
    assert "The attention GPU has 3.08 GB of weights" in text
    assert "each of 3 expert GPUs has 19.5 GB of weights." in text, "43 of 128 experts"
    kv = served(text).kv_memory_gib
    assert 0.9 * 141e9 - 2**30 < 3.08e9 + kv * 2**30 <= 0.9 * 141e9
    room = int(kv * 2**30 // (98_304 * 1008))
    assert f"At most {room:,} requests of 1,000 tokens (--context) fit at a time." in text
    assert table(said(big, "--gpus", "4", "--tokens", str(4 * room), "--gpu", "l40s", codes=(0, 2))) == {}, "none fits"


def test_a_batch_is_as_large_as_the_kv_caches(said: Callable[..., str], big: str) -> None:
    words = (big, "--gpus", "1", "--context", "4096", "--tokens")
    [most] = re.findall(r"At most ([0-9]+) requests of 4,096 tokens", said(*words, "1"))
    assert served(said(*words, most)).max_num_seqs == int(most)
    assert "cannot hold the model" in said(*words, str(int(most) + 1), codes=(2,))


@pytest.mark.parametrize(
    ("shapes", "measured_ms"),
    [(QWEN3_30B, {1: 5.03, 32: 16.63, 128: 20.35, 512: 28.2}), (OLMOE, {1: 1.88, 32: 5.01, 128: 6.32, 512: 11.93})],
    ids=["qwen3-30b", "olmoe"],
)
def test_a_step_is_within_the_margin_that_users_see(
    tmp_path: Path, shapes: dict[str, Any], measured_ms: dict[int, float]
) -> None:
    """docs/results.md, an engine step: one H200, prompts of 128 tokens."""
    spec = load_spec(config_of(tmp_path, shapes))
    given = Namespace(gpus=1, nodes=1, gpu="h200", context=200, skew=1.5, link_gb=None, link_us=4.1, lockstep_us=2500)
    for batch, ms in measured_ms.items():
        assert row(spec, given, batch).best_s * 1e3 == pytest.approx(ms, rel=STEP_MARGIN), batch


def test_steps_that_the_server_takes_through_shared_memory_are_as_large_as_in_a_plan(
    said: Callable[..., str], big: str
) -> None:
    assert SHARED_ROWS == SERVERS_ROWS
    words = (big, "--gpus", "2", "--gpu", "a100", "--context", "16", "--tokens")
    at_most = table(said(*words, "512,1024"))
    assert "disaggregated, 1 + 1" in at_most[512][-1] or at_most[512][1] != "-"
    assert at_most[1024][1] == "-", "one attention GPU, 1,024 tokens"


def test_two_micro_batches_are_for_several_nodes(said: Callable[..., str], big: str) -> None:
    """Between GPUs of one node steps are CUDA graphs, and there are none of two micro-batches."""
    assert "ping-pong" not in said(big, "--gpus", "16", "--gpu", "l40s", "--tokens", "256")
    assert "ping-pong, " in said(big, "--gpus", "16", "--gpu", "l40s", "--tokens", "256", "--nodes", "4")


def test_across_nodes_it_compares_both_exchanges(said: Callable[..., str], big: str) -> None:
    words = ("--gpus", "16", "--nodes", "4", "--tokens", "16,65536", "--context", "16")
    text = said("--model", big, *words)
    assert "A batch of 16 across 4 nodes" in text
    assert text.count("25% of the messages") == 2
    assert "us flat" in text
    assert "hierarchical is better." in text
    assert "ExpertFlow" not in text


def test_the_estimate_is_of_the_layout_that_is_named(said: Callable[..., str], big: str) -> None:
    """GPUs of one node that share experts have seats, those of several nodes are in lock-step."""
    words = (big, "--gpu", "l40s")
    [alone] = table(said(*words, "--gpus", "4", "--tokens", "8")).values()
    [copies] = table(said(*words, "--gpus", "8", "--nodes", "2", "--tokens", "16", "--across-us", "50000")).values()
    assert int(copies[0]) == pytest.approx(2 * int(alone[0]), abs=1), "no token of a copy leaves its node"
    [apart] = table(said(*words, "--gpus", "2", "--nodes", "2", "--tokens", "8", "--across-us", "1")).values()
    assert apart[-1] == "lockstep *"
    assert 8 / int(apart[0]) > 48 * 2 * 2500e-6, "lock-step's latency, there and back"


def test_expertflow_is_shown_where_it_is_asked_for(said: Callable[..., str], big: str) -> None:
    text = said(big, "--gpus", "16", "--batches", "32", "--block", "8")
    assert "P = 32, D = 16, E_block = 8: data parallelism, expert parallelism, pipelining; 16 blocks" in text
    text = said(MODEL, "--gpus", "1", "--batches", "1")
    assert "none of the three; 1 block of experts, at most 1 on a GPU." in text


def test_it_says_what_it_assumes_and_how_far_off_it_was(said: Callable[..., str], big: str) -> None:
    text = said("--model", big, "--gpus", "4", "--tokens", "32", "--context", "77", "--link-us", "9")
    assert "77 tokens of context" in text
    assert "on one H200 within 7% of eight decode steps" in text
    assert "within 25% of 20 measured times" in text
    assert "one h200 reaches 4.30 TB/s and 790 Tflop/s (measured; kernels/bench/floors.py)" in text
    assert "shared memory in 9 us plus their bytes at 295 GB/s, one way (ADR 5)" in text
    assert "Not measured: whole steps of several GPUs, other splits.\n" in text
    text = said("--model", big, "--gpus", "4", "--gpu", "h100", "--nodes", "2", "--tokens", "32")
    assert "Not measured: whole steps of several GPUs, other splits, the h100, several nodes.\n" in text
    assert "a guess: set --across-us, --across-gb" in text
    assert "in lock-step over NCCL, 5,000 us a layer" in text


def test_prose_is_wrapped_and_the_command_is_not(
    said: Callable[..., str], big: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = said(big, "--gpus", "4", "--tokens", "128")
    long = [line for line in text.splitlines() if len(line) > 80]
    assert [line.split()[0] for line in long] == ["expertmesh"]
    assert served(text).expert_workers == 3


def test_a_model_of_the_hub_keeps_its_id(said: Callable[..., str], big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []

    def fetched(settings: Settings) -> Path:
        asked.append(settings)
        return Path(big)

    monkeypatch.setattr("services.planner.plan.config_folder", fetched)
    text = said("Qwen/Qwen3-30B-A3B", "--revision", "main", "--gpus", "1", "--tokens", "8")
    assert [str(settings.model) for settings in asked] == ["Qwen/Qwen3-30B-A3B"]
    settings = served(text)
    assert (str(settings.model), settings.revision) == ("Qwen/Qwen3-30B-A3B", "main")
    text = said("Qwen/Qwen3-30B-A3B", "--gpus", "2", "--nodes", "2", "--tokens", "8")
    assert "Run in a clone of expertmesh" in text, "the chart is a folder of it"
    words = run_line(text)
    assert "model.pvc.prefetch.source=hf://Qwen/Qwen3-30B-A3B@main" in words[-1].split(",")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpus", "2"], "There is no model to plan for. Give its folder"),
        (["/nowhere", "--gpus", "2"], "/nowhere is not a folder"),
        ([MODEL], "required: --gpus"),
        ([MODEL, "--gpus", "3", "--nodes", "2"], "3 GPUs cannot be spread evenly over 2 nodes"),
        ([MODEL, "--gpus", "1", "--nodes", "2"], "1 GPU cannot be spread"),
        ([MODEL, "--gpus", "2", "--gpu", "b9"], "Known: a100, b200, h100, h200, l40s"),
        ([MODEL, "--gpus", "2", "--tokens", "4,q"], "no list of whole numbers"),
        ([MODEL, "--gpus", "2", "--tokens", "0"], "tokens = 0"),
        ([MODEL, "--gpus", "2", "--skew", "-1"], "skew = -1.0"),
        ([MODEL, "--gpus", "2", "--context", "0"], "--context is 0; expected 1 to 1,024"),
        ([MODEL, "--gpus", "2", "--context", "1025"], "--context is 1025; expected 1 to 1,024"),
        ([MODEL, "--gpus", "2", "--weight-bits", "16"], "--weight-bits is no longer an option. Leave it out"),
        ([MODEL, "--gpus", "2", "--quantization", "fp8"], "config.json says how a checkpoint is quantised"),
        ([MODEL, "--gpus", "2", "--link-gb", "0"], "bandwidth = 0.0"),
        ([MODEL, "--gpus", "2", "--nodes", "2", "--across-gb", "0"], "across_bandwidth = 0.0"),
    ],
)
def test_bad_input(said: Callable[..., str], words: list[str], problem: str) -> None:
    text = said(*words, codes=(2, 3))
    assert problem in text


@pytest.mark.parametrize(("asked", "total", "served_as"), [("int4", "18 GB", "int4"), ("int8", "32.1 GB", "int8")])
def test_experts_are_counted_as_they_are_held(
    said: Callable[..., str], big: str, asked: str, total: str, served_as: str
) -> None:
    """Of 61.1 GB 58.0 are experts, in 4 bits and a scale for 128 columns 14.9 GB; 3.1 are others."""
    dense, text = said(big, "--gpus", "1"), said(big, "--gpus", "1", "--expert-format", asked)
    assert f"parameters, {total} in bfloat16, experts in {asked}" in text
    assert served(text).expert_format == served_as
    assert "slower than 16 bits from about 100 rows on, as in prefill" in text
    assert "slower than 16 bits" not in dense
    faster, slower = (float(table(text)[32][0].replace(",", "")), float(table(dense)[32][0].replace(",", "")))
    assert 1.1 < faster / slower < 2.5


def test_a_checkpoint_in_a_form_that_kernels_take_is_counted_so(said: Callable[..., str], tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    quantised = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    folder = str(config_of(tmp_path, QWEN3_30B | {"quantization_config": quantised}))
    text = said(folder, "--gpus", "1")
    assert "18 GB in bfloat16, experts in int4-g128" in text
    assert "(compressed-tensors); experts are counted as they are held, in int4-g128, other weights in 16 bits." in text
    assert "slower than 16 bits from about 100 rows on" in text
    (tmp_path / "fp8").mkdir()
    fp8 = said(
        str(config_of(tmp_path / "fp8", QWEN3_30B | {"quantization_config": {"quant_method": "fp8"}})), "--gpus=1"
    )
    assert "Layers of experts in fp8-channel were not measured: times are those of 16 bits, memory is theirs." in fp8
    (tmp_path / "blocks").mkdir()
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = said(str(config_of(tmp_path / "blocks", QWEN3_30B | {"quantization_config": blocks})), "--gpus=1")
    assert "FP8 experts are faster than 16 bits where a step has several rows" in text
    assert "61.1 GB in bfloat16;" in said(folder, "--gpus", "1", "--expert-format", "dense")


def test_linear_layers_are_counted_as_they_are_held(said: Callable[..., str], tmp_path: Path) -> None:
    """Of 3.1 GB beside experts 1.8 are queries, keys, values and outputs: in 4 bits 0.5, and a step takes less time."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    quantised = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    folder = str(config_of(tmp_path, QWEN3_30B | {"quantization_config": quantised}))
    text = said(folder, "--gpus", "1", "--dense-format", "stored")
    assert "16.7 GB in bfloat16, experts in int4-g128, linear layers in int4-g128;" in text
    assert "linear layers are counted as they are held, in int4-g128, other weights in 16 bits." in text
    assert served(text).dense_format == "stored"
    dense = said(folder, "--gpus", "1")
    assert served(dense).dense_format == "dense"
    faster, slower = (float(table(each)[32][0].replace(",", "")) for each in (text, dense))
    assert 1 < faster / slower < 1.3
    assert "61.1 GB in bfloat16;" in said(folder, "--gpus", "1", "--expert-format", "dense")


def test_layers_that_are_held_apart_are_told_by_what_most_are(said: Callable[..., str], tmp_path: Path) -> None:
    """Times are those of most layers, and the text says so."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
    quantised = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    quantised["ignore"] = ["model.layers.0.mlp.experts.3.down_proj"]
    text = said(str(config_of(tmp_path, QWEN3_30B | {"quantization_config": quantised})), "--gpus", "1")
    assert "experts in dense.int4-g128-" in text
    assert "Most layers of experts are in int4-g128: times are theirs, memory is that of each layer." in text
    assert "slower than 16 bits from about 100 rows on" in text
    assert "were not measured" not in text


def test_a_cluster_gets_the_format_for_all_its_workers(said: Callable[..., str], big: str) -> None:
    words = run_line(said(big, "--gpus", "4", "--nodes", "2", "--expert-format", "int8"))
    assert "config.expert_format=int8" in words[-1].split(",")
    assert "DENSE_FORMAT" not in words[-1]


def test_a_cluster_gets_how_linear_layers_are_held_as_a_variable(said: Callable[..., str], tmp_path: Path) -> None:
    """Of both roles that compute: the chart has no value for it."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = str(config_of(tmp_path, QWEN3_30B | quantised))
    values = run_line(said(folder, "--gpus", "4", "--nodes", "2", "--dense-format", "stored"))[-1].split(",")
    for role in ("attention", "experts"):
        assert f"{role}.extraEnv[0].name=EXPERTMESH_DENSE_FORMAT" in values
        assert f"{role}.extraEnv[0].value=stored" in values


RESULTS = ROOT / "kernels/bench/results.csv"
LAYERS = {"mixtral": (8, 2), "olmoe": (64, 8), "qwen3-30b": (128, 8), "gpt-oss-20b": (32, 4)}
"""Experts, and those of a token."""


def test_times_of_formats_are_those_of_the_benchmark() -> None:
    """Each measured point is within 0.3 of what the planner takes between its own, and most are far nearer."""
    measured: dict[tuple[str, int, str], list[float]] = {}
    for line in csv.DictReader(RESULTS.open()):
        if line["suite"] in ("int4", "formats") and (line["op"], line["provider"]) == ("fused_moe", "ours"):
            measured.setdefault((line["shape"], int(line["rows"]), line["dtype"]), []).append(float(line["p50_us"]))
    names = {"int8": "int8-g128", "int8_channel": "int8-channel", "int4": "int4-g128", "int4_channel": "int4-channel"}
    names |= {"fp8": "fp8-128x128", "mxfp4": "mxfp4-g32"}
    off = []
    for (shape, rows, dtype), times in measured.items():
        if dtype in names and (shape, rows, "bf16") in measured:
            experts, chosen = LAYERS[shape]
            hit = experts * (1 - (1 - chosen / experts) ** rows)
            ratio = median(times) / median(measured[shape, rows, "bf16"])
            off.append(abs(between_points(EXPERT_TIMES[names[dtype]], rows * chosen / hit) - ratio))
    assert len(off) == 84 + 3 + 1
    assert max(off) < 0.3
    assert median(off) < 0.06


def test_a_quantised_checkpoint_is_planned_as_it_is_held(said: Callable[..., str], tmp_path: Path) -> None:
    """Here in 16 bits, as kernels take no 2: the figures are those of the checkpoint that is not quantised."""
    texts = []
    for name, more in (("plain", {}), ("gptq2", {"quantization_config": {"quant_method": "gptq", "bits": 2}})):
        (tmp_path / name).mkdir()
        folder = config_of(tmp_path / name, QWEN3_30B | more)
        texts.append(said(str(folder), "--gpus", "8").replace(str(folder), "FOLDER"))
    note = "The checkpoint is quantised (gptq); weights are counted as they are held, in 16 bits.\n"
    assert note in texts[1]
    assert texts[1].replace(note, "") == texts[0]


def test_a_method_that_is_not_supported_is_refused(said: Callable[..., str], tmp_path: Path) -> None:
    folder = config_of(tmp_path, QWEN3_30B | {"quantization_config": {"quant_method": "hqq"}})
    assert 'quantized checkpoints of quant_method "hqq"' in said(str(folder), "--gpus", "8", codes=(3,))


def test_weights_that_fit_in_no_way(said: Callable[..., str], big: str) -> None:
    text = said(big, "--gpus", "1", "--gpu", "l40s", codes=(2,))
    assert "1 x l40s cannot hold the model: its weights take 61.1 GB in 16 bits" in text
    assert "the KV cache of 32 requests 3.2 GB" in text
    assert "of a GPU's 48 GB 90% can be used" in text


def test_a_model_has_no_more_groups_than_experts(said: Callable[..., str], tmp_path: Path) -> None:
    few = config_of(tmp_path, QWEN3_30B | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 49_152})
    settings = served(said(str(few), "--gpus", "8", "--tokens", "32"))
    assert (settings.expert_groups or 1) <= 2


def test_what_a_model_of_a_trillion_holds_is_written_out(said: Callable[..., str], tmp_path: Path) -> None:
    """Kimi-K2 in FP8, whose tokens take 70,272 bytes each: 61 layers of 576 numbers."""
    kimi = EXAMPLES["DeepSeek-V3 in FP8"] | {"model_type": "kimi_k2", "num_attention_heads": 64, "n_group": 1}
    kimi |= {"num_key_value_heads": 64, "n_routed_experts": 384, "topk_group": 1, "first_k_dense_replace": 1}
    base = {"tie_word_embeddings": False, "dtype": "bfloat16", "vocab_size": 163_840}
    (tmp_path / "config.json").write_text(json.dumps(kimi | base))
    text = said(str(tmp_path), "--gpus", "16", "--gpu", "h200", "--tokens", "256")
    assert "1,026 billion parameters, 1,038 GB" in text
    [gib] = re.findall(r"--kv-memory-gib (\d+)", text)
    [requests] = re.findall(r"At most ([0-9,]+) requests of 1,024", text)
    gpus = re.findall(r"--layout disaggregated --workers (\d+)", text) or ["16"]
    assert int(requests.replace(",", "")) == int(gpus[0]) * int(int(gib) * 2**30 / (1024 * 70_272))


@pytest.mark.parametrize("context", ["1024", "200000"])
def test_a_worker_has_room_for_the_states_of_the_batch_that_is_recommended(
    said: Callable[..., str], tmp_path: Path, context: str
) -> None:
    """Qwen3.5-35B-A3B, whose states may take half of the memory that pages leave."""
    shapes = {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 248_320, "max_position_embeddings": 262_144, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    spec, words = load_spec(tmp_path), ("--gpus", "4", "--gpu", "h200", "--context", context)
    text = said(str(tmp_path), *words)
    [gib], [seqs] = re.findall(r"--kv-memory-gib (\d+)", text), re.findall(r"--max-num-seqs (\d+)", text)
    room = state_room(spec, int(seqs), asked=True, memory=int(gib) << 30)
    [most] = re.findall(r"At most ([0-9,]+) requests?", text)
    workers = [*re.findall(r"--workers (\d+)", text), "1"][0]
    each = int(most.replace(",", "")) // int(workers)
    assert room.max_num_seqs == int(seqs) <= each
    assert state_room(spec, each, asked=True, memory=int(gib) << 30).max_num_seqs == each
    pages = each * int(context) * spec.kv_bytes(2) + state_nbytes(spec, each)
    assert pages <= int(gib) << 30


def in_the_readme() -> list[tuple[str, str, str]]:
    """Example, weights and GPUs of the README's table of models."""
    table = (ROOT / "README.md").read_text().split("| family (`model_type`) |")[1].split("\n\n")[0]
    rows = [[cell.split("; ") for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    return [one for _, *cells in rows for one in zip(*cells, strict=True)]


@pytest.mark.parametrize(("name", "held", "gpus"), in_the_readme())
def test_as_few_gpus_as_the_readme_says_hold_a_model(
    said: Callable[..., str], tmp_path: Path, name: str, held: str, gpus: str
) -> None:
    base = {"tie_word_embeddings": False, "dtype": "bfloat16", "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(base | {"model_type": "qwen3_moe"} | EXAMPLES[name]))
    words = (str(tmp_path), "--gpu", "h100", "--gpus")
    [size] = re.findall(r"parameters, ([0-9.]+) GB in bfloat16", said(*words, gpus))
    assert f"{float(size):.0f} GB" == held
    if int(gpus) > 1:
        assert "cannot hold the model" in said(*words, str(int(gpus) - 1), codes=(2,))


def test_the_worked_load_has_the_figures_of_its_commands(said: Callable[..., str], big: str) -> None:
    text = (ROOT / "docs/operating.md").read_text()
    [passage] = re.findall(r"(?s)\n### How many GPUs a load takes\n(.*?)\n##", text)
    one, all_gpus = (shlex.split(words) for words in re.findall(r"plan \S+ (--gpus [^`]+)`", " ".join(passage.split())))
    [rate, ms] = re.findall(r"Expect ([0-9,]+) tokens/s, ([0-9.]+) ms", said(big, *one))[0]
    gpus = 40_000 / int(rate.replace(",", ""))
    assert f"40,000 / {rate} = {gpus:.1f} GPUs" in passage
    assert f"{gpus + 100_000 / 63_700:.1f} / 0.7" in passage
    assert f"200 x 200 x {float(ms) / 1e3:.3f} = {40_000 * round(float(ms) / 1e3, 3):,.0f}" in passage
    settings = served(said(big, *all_gpus))
    assert f"{settings.max_num_seqs} requests at a time on each GPU" in " ".join(passage.split())
    assert f"`--max-num-batched-tokens {settings.max_num_batched_tokens}`" in passage
