"""Multi-head latent attention: its families' keys, what is refused by name, and every form of its products."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import BASE, CONFIGS, DEEPSEEK2, DEEPSEEK3, YARN_ROPE, ServingPath, save_model

from moe_kernels import ArgumentError
from moe_kernels.paged_latent.op import paged_latent
from services.errors import CheckpointError, UnsupportedModel
from services.model import latent_attention, latent_plan
from services.model.checkpoint import Checkpoint
from services.model.inputs import DecodeRows, SequenceRows, StepInputs
from services.model.latent_config import MAX_RANK, MAX_SIZE
from services.model.latent_plan import LatentPlan, LatentPlanner
from services.model.load_spec import load_spec
from services.model.reference import ReferenceModel
from services.model.spec import LatentSpec, ModelSpec, RouterSpec

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
TOKENS = [3, 90, 17, 44, 5, 61, 8, 8, 29, 70, 11]
SIZES = LatentSpec(rank=512, rotated=64, plain=128, value=128, scale=192**-0.5, query_rank=1536)


def spec_of(folder: Path, config: dict[str, Any], change: dict[str, Any] | None = None) -> ModelSpec:
    merged = BASE | config | (change or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not ...}))
    return load_spec(folder)


def in_pieces(folder: Path, lengths: tuple[int, ...] = (len(TOKENS),)) -> torch.Tensor:
    path = ServingPath(folder)
    run = path.start(TOKENS)
    for length in lengths:
        path.step([(run, length)])
    return torch.cat(run.logits)


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    few = dict.fromkeys((*DEEPSEEK3, *DEEPSEEK2), ...)
    v3 = spec_of(tmp_path, DEEPSEEK3, few | {"model_type": "deepseek_v3", "num_hidden_layers": 5})
    assert v3.latent == SIZES
    groups: dict[str, Any] = {"groups": 8, "top_groups": 4, "group_score": "top2_sum"}
    assert v3.router == RouterSpec(score="sigmoid", renormalise=True, scale=2.5, bias=True, **groups)
    assert (v3.num_experts, v3.top_k, v3.expert_ffn, v3.shared_ffn, v3.moe_layers) == (256, 8, 2048, 2048, (3, 4))
    assert (v3.rope.dim, v3.rope.interleaved, v3.head_dim, v3.num_kv_heads, v3.mtp_layers) == (64, True, 192, 1, 1)
    v2 = spec_of(tmp_path, DEEPSEEK2, few | {"model_type": "deepseek_v2", "num_experts_per_tok": 6})
    assert (v2.router, v2.num_experts, v2.expert_ffn, v2.shared_ffn) == (RouterSpec(), 64, 1407, 2814)
    assert (v2.latent, v2.moe_layers, v2.mtp_layers) == (SIZES, (0, 1, 2), 0)


def test_glm_flash_has_sizes_of_its_own(tmp_path: Path) -> None:
    few = dict.fromkeys(DEEPSEEK3, ...) | {"model_type": "glm4_moe_lite", "num_hidden_layers": 3}
    glm = spec_of(tmp_path, DEEPSEEK3, few)
    sizes = LatentSpec(rank=512, rotated=64, plain=192, value=256, scale=1 / 16, query_rank=768)
    assert (glm.latent, glm.rms_eps, glm.top_k, glm.num_experts, glm.expert_ffn) == (sizes, 1e-5, 4, 64, 1536)
    assert (glm.moe_layers, glm.router.scale, glm.router.groups, glm.mtp_layers) == ((1, 2), 1.8, 1, 1)


def test_yarn_raises_the_scale_of_the_softmax(tmp_path: Path) -> None:
    """By the square of 0.1 mscale_all_dim log(factor) + 1; cos and sin by the ratio of two of these."""
    plain = spec_of(tmp_path, DEEPSEEK3).latent
    rope = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.5}
    spec = spec_of(tmp_path, DEEPSEEK3, {"rope_scaling": rope})
    assert plain is not None
    assert spec.latent is not None
    assert plain.scale == pytest.approx(24**-0.5)
    assert spec.latent.scale == pytest.approx(24**-0.5 * (0.05 * np.log(4) + 1) ** 2)
    assert spec.rope.attention_factor == pytest.approx((0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))


def test_a_temperature_of_0_is_none(tmp_path: Path) -> None:
    """As in transformers, and in DeepSeek's own defaults."""
    specs = [
        spec_of(tmp_path, DEEPSEEK3, {"rope_scaling": YARN_ROPE | rope})
        for rope in ({"mscale": 0, "mscale_all_dim": 0.0}, {"mscale": 1.0, "mscale_all_dim": 0}, {})
    ]
    assert len({(spec.latent, spec.rope) for spec in specs}) == 1


def test_numbers_of_a_key_that_are_not_rotated_may_be_odd(tmp_path: Path) -> None:
    model = save_model(tmp_path, DEEPSEEK3 | {"qk_nope_head_dim": 13, "v_head_dim": 7, "kv_lora_rank": 15})
    with torch.no_grad():
        expected_TV = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ReferenceModel.load(tmp_path).logits(TOKENS), expected_TV, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_pieces(tmp_path, (4, 1, 6)), expected_TV, atol=1e-5, rtol=1e-5)


def test_the_longest_latent_is_that_of_the_kernel() -> None:
    q_SNZ, cache_PBZ = torch.zeros(1, 1, MAX_SIZE), torch.zeros(1, 4, MAX_SIZE)
    blocks_SM, kv_len_S = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    paged_latent(q_SNZ, cache_PBZ, blocks_SM, kv_len_S, rank=MAX_RANK, scale=1.0)
    with pytest.raises(ArgumentError, match="rank must be at most"):
        paged_latent(q_SNZ, cache_PBZ, blocks_SM, kv_len_S, rank=MAX_RANK + 1, scale=1.0)
    with pytest.raises(ArgumentError, match="q must have heads"):
        paged_latent(torch.zeros(1, 1, MAX_SIZE + 1), cache_PBZ, blocks_SM, kv_len_S, rank=MAX_RANK, scale=1.0)


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    model = save_model(tmp_path, DEEPSEEK3 | {"n_group": 1, "topk_group": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    assert load_spec(tmp_path).family == "kimi_k2"
    with torch.no_grad():
        expected_TV = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(in_pieces(tmp_path), expected_TV, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ReferenceModel.load(tmp_path).logits(TOKENS), expected_TV, atol=1e-5, rtol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "score": (DEEPSEEK3, {"scoring_func": "softmax"}, ["scoring_func 'softmax'", "deepseek_v3", "'sigmoid'"]),
    "choice": (DEEPSEEK3, {"topk_method": "greedy"}, ["topk_method 'greedy'", "'noaux_tc'"]),
    "some_layers": (DEEPSEEK3, {"moe_layer_freq": 2}, ["moe_layer_freq 2"]),
    "fewer_keys": (DEEPSEEK3, {"num_key_value_heads": 2}, ["num_key_value_heads 2", "Supported is 4"]),
    "bias": (DEEPSEEK3, {"q_lora_rank": None, "attention_bias": True}, ["attention_bias without q_lora_rank"]),
    "a_part": (DEEPSEEK3, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
    "normed": (DEEPSEEK2, {"norm_topk_prob": True}, ["norm_topk_prob True", "deepseek_v2"]),
    "sigmoid": (DEEPSEEK2, {"scoring_func": "sigmoid"}, ["scoring_func 'sigmoid'"]),
    "groups": (DEEPSEEK2, {"topk_method": "noaux_tc"}, ["topk_method 'noaux_tc'", "group_limited_greedy"]),
    "mlp_bias": (DEEPSEEK2, {"mlp_bias": True}, ["mlp_bias True"]),
    "long": (DEEPSEEK3, {"kv_lora_rank": 520}, ["kv_lora_rank 520", "qk_rope_head_dim 10", "at most 512 numbers"]),
    "longer": (DEEPSEEK3, {"kv_lora_rank": 512, "qk_rope_head_dim": 66}, ["kv_lora_rank 512", "576 with those"]),
    "lite": (DEEPSEEK3, {"model_type": "glm4_moe_lite", "first_k_dense_replace": 2}, ["first_k_dense_replace 2"]),
    "sparse": (DEEPSEEK3, {"model_type": "deepseek_v32"}, ['"deepseek_v32" is not supported', "nearest is"]),
}


@pytest.mark.parametrize(("config", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_options_that_are_not_implemented_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    spec_of(tmp_path, config)
    with pytest.raises(UnsupportedModel) as error:
        spec_of(tmp_path, config, change)
    assert all(word in str(error.value) for word in [*words, "config.json"])


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "odd": (DEEPSEEK3, {"qk_rope_head_dim": 9}, '"qk_rope_head_dim" must be an even number, found 9'),
    "head_dim": (DEEPSEEK3, {"head_dim": 12}, '"head_dim" must be 10, as qk_rope_head_dim'),
    "qk_head_dim": (DEEPSEEK3, {"qk_head_dim": 12}, '"qk_head_dim" must be 24'),
    "rank": (DEEPSEEK3, {"kv_lora_rank": 0}, '"kv_lora_rank" must be a whole number above 0'),
    "query_rank": (DEEPSEEK3, {"q_lora_rank": 0}, '"q_lora_rank" must be a whole number above 0'),
    "value": (DEEPSEEK3, {"v_head_dim": "all"}, '"v_head_dim" must be a whole number above 0'),
    "groups": (DEEPSEEK3, {"n_group": 3}, "do not divide into the 3 groups"),
    "chosen": (DEEPSEEK2, {"num_experts_per_tok": None}, '"num_experts_per_tok" must be a whole number'),
    "grouped": (DEEPSEEK2, {"topk_method": "group_limited_greedy"}, '"n_group" must be a whole number above 0'),
}


@pytest.mark.parametrize(("config", "change", "words"), WRONG.values(), ids=WRONG)
def test_numbers_that_contradict_one_another_are_named(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    spec_of(tmp_path, config)
    with pytest.raises(CheckpointError) as error:
        spec_of(tmp_path, config, change)
    assert words in str(error.value)


def test_fingerprints_follow_the_flags(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"rope_interleave": False}, {"q_lora_rank": None}, {"v_head_dim": 8}, {"attention_bias": True},
        {"qk_nope_head_dim": 16}, {"rope_scaling": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ]  # fmt: skip
    found = {spec_of(tmp_path, DEEPSEEK3, change).fingerprint for change in changes}
    assert len(found) == len(changes)


def change_tensors(folder: Path, added: dict[str, torch.Tensor], without: tuple[str, ...] = ()) -> None:
    tensors = load_file(folder / WEIGHTS) | added
    save_file({name: tensor.clone() for name, tensor in tensors.items() if name not in without}, folder / WEIGHTS)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error, Checkpoint(folder, load_spec(folder)):
        pass
    return str(error.value)


def test_layers_that_predict_further_ahead_change_nothing(tmp_path: Path) -> None:
    """As published: behind the last layer, with all that a layer has, and more."""
    save_model(tmp_path, DEEPSEEK3)
    before = in_pieces(tmp_path)
    last = {
        name.replace("layers.2.", "layers.3."): tensor
        for name, tensor in load_file(tmp_path / WEIGHTS).items()
        if "layers.2." in name
    }
    more = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.head.weight")
    change_tensors(tmp_path, last | {f"model.layers.3.{name}": torch.ones(3, 5) for name in more})
    assert torch.equal(in_pieces(tmp_path), before)
    assert ReferenceModel.load(tmp_path).logits(TOKENS).isfinite().all()
    spec = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(spec | {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}))
    assert "no place for" in refused(tmp_path)


def test_missing_and_contradicting_tensors_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, DEEPSEEK3)
    name = "model.layers.1.self_attn.{}.weight"
    kept = load_file(tmp_path / WEIGHTS)
    change_tensors(tmp_path, {}, without=(name.format("kv_b_proj"), name.format("q_a_layernorm")))
    assert "lacks 2 tensors" in refused(tmp_path)
    assert f'"{name.format("kv_b_proj")}"' in refused(tmp_path)
    change_tensors(tmp_path, kept | {name.format("kv_a_proj_with_mqa"): torch.zeros(26, 32)})
    assert "has shape [26, 32], config.json calls for [36, 32]" in refused(tmp_path)
    change_tensors(tmp_path, kept | {name.format("k_proj"): torch.zeros(26, 32)})
    assert f'no place for 1 tensor ("{name.format("k_proj")}")' in refused(tmp_path)


@pytest.mark.parametrize("form", ["fp8-block", "fp8-block-remainder", "ct-fp8-channel"])
def test_quantised_projections(tmp_path: Path, form: str) -> None:
    """Those to latents and from them are quantised too, and blocks leave a remainder of each."""
    save_model(tmp_path / "plain", DEEPSEEK3 | {"tie_word_embeddings": False})
    made = quantise(tmp_path / "plain", tmp_path, FORMATS[form])
    assert {"kv_b_proj", "kv_a_proj_with_mqa", "q_a_proj"} <= {name.split(".")[-2] for name in made.quantised}
    expected = ReferenceModel.load(made.reference).logits(TOKENS)
    torch.testing.assert_close(ReferenceModel.load(made.folder).logits(TOKENS), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_pieces(made.folder, (3, 8)), expected, atol=1e-5, rtol=1e-5)


def test_some_heads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, DEEPSEEK3)
    expected = ReferenceModel.load(tmp_path).logits(TOKENS)
    calls: list[int] = []
    expanded = latent_attention.LatentAttention._expanded

    def counted(self: Any, piece: Any, q_WNH: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        calls.append(q_WNH.shape[1])
        return expanded(self, piece, q_WNH, *others)

    monkeypatch.setattr(latent_attention.LatentAttention, "_expanded", counted)
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 3 * len(TOKENS) * 50 * 4)
    torch.testing.assert_close(in_pieces(tmp_path), expected, atol=1e-5, rtol=1e-5)
    assert calls == [3, 1] * 3


@pytest.mark.parametrize("absorbed", [False, True])
def test_both_forms_of_a_piece_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, absorbed: bool) -> None:
    save_model(tmp_path, CONFIGS["deepseek3-yarn"])
    expected = ReferenceModel.load(tmp_path).logits(TOKENS)
    monkeypatch.setattr(LatentPlanner, "_absorbs", lambda _self, rows, _positions: absorbed or rows == 1)
    torch.testing.assert_close(in_pieces(tmp_path, (4, 1, 6)), expected, atol=1e-5, rtol=1e-5)


def inputs_of(decodes: list[int], pieces: list[tuple[int, int]], block_size: int = 4) -> StepInputs:
    rows = len(decodes) + sum(length for length, _ in pieces)
    held = [list(range(100 * at, 100 * at + -(-length // block_size))) for at, length in enumerate(decodes)]
    width = max(map(len, held), default=0)
    starts = np.cumsum([len(decodes), *(length for length, _ in pieces)]).tolist()
    return StepInputs(
        token_ids_T=torch.zeros(rows, dtype=torch.int64),
        positions_T=torch.zeros(rows, dtype=torch.int64),
        slots_T=torch.zeros(rows, dtype=torch.int64),
        logits_rows_R=torch.zeros(0, dtype=torch.int64),
        decodes=DecodeRows(
            kv_len_B=np.array(decodes), blocks_BM=np.array([own + own[-1:] * (width - len(own)) for own in held])
        )
        if decodes
        else None,
        sequences=tuple(
            SequenceRows(start=start, length=length, kv_len=kv_len, blocks=range(1000, 1000 + -(-kv_len // block_size)))
            for start, (length, kv_len) in zip(starts, pieces, strict=False)
        ),
    )


def as_on_a_gpu(inputs: StepInputs, monkeypatch: pytest.MonkeyPatch) -> LatentPlan:
    planner = LatentPlanner(SIZES, block_size=4, device=CPU)
    monkeypatch.setattr(planner, "_on_cpu", False)
    return planner.plan(inputs)


def test_a_gpu_takes_rows_of_short_pieces_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = as_on_a_gpu(inputs_of([9, 30], [(200, 200), (3, 17), (1, 6)]), monkeypatch)
    (rows,) = plan.rows
    assert rows.rows_B is not None
    assert rows.rows_B.tolist() == [0, 1, 202, 203, 204, 205]
    assert rows.kv_len_B.tolist() == [9, 30, 15, 16, 17, 6]
    assert rows.blocks_BM[:, 0].tolist() == [0, 100, 1000, 1000, 1000, 1000]
    assert [(piece.start, piece.length, piece.mask_WL) for piece in plan.pieces] == [(2, 200, None)]
    alone = as_on_a_gpu(inputs_of([], [(5, 17)]), monkeypatch)
    assert (alone.rows[0].rows_B, alone.pieces) == (None, ())


def test_long_prefixes_absorb_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3's sizes: 512 x 256 products for a position against 768 more for each row and position."""
    assert latent_plan.FEW < 170
    short, long = (as_on_a_gpu(inputs_of([], [(170, kv_len)]), monkeypatch) for kv_len in (171, 100_000))
    assert not short.rows
    assert [piece.absorbed for piece in short.pieces] == [False]
    assert not long.pieces
    assert not as_on_a_gpu(inputs_of([], [(171, 100_000)]), monkeypatch).rows
