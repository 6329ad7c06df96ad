"""The pocket models compute what transformers and the server's oracle compute from the folder they export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from testkit.pocket.evidence import lively
from testkit.pocket.runs import make_work
from torch import Tensor
from torch.nn import functional as F

import moe_kernels as mk
from pocket_moe.config import POCKET, ModelType, PocketConfig, tiny
from pocket_moe.corpus.batches import Batch
from pocket_moe.corpus.documents import _starts
from pocket_moe.errors import PocketError
from pocket_moe.model import export
from pocket_moe.model.dense import dense_like, speculator
from pocket_moe.model.losses import NO_TARGET, next_tokens, router_losses
from pocket_moe.model.model import Options, PocketMoe
from services.model.reference import ReferenceModel

CONFIGS = {
    "tiny-moe": tiny(),
    "tiny-qwen3": tiny("qwen3"),
    "tiny-llama": tiny("llama"),
    "pocket": POCKET,
    "dense": dense_like(POCKET),
    "speculator": speculator(POCKET),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_work(tmp_path_factory.mktemp("pocket") / "work", documents=20)


def two_documents(config: PocketConfig) -> tuple[Tensor, Tensor]:
    tokens_BL = torch.randint(4, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(2))
    positions_BL = torch.stack([torch.cat([torch.arange(20), torch.arange(28)]), torch.arange(48)])
    return tokens_BL, positions_BL


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_is_read_alike_by_transformers_the_oracle_and_ourselves(
    name: str, work: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = lively(CONFIGS[name])
    export.save(model, work / "tokenizer", tmp_path / "model", "float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(theirs).__name__ == json.loads((tmp_path / "model/config.json").read_text())["architectures"][0]
    tokens_BL, _ = two_documents(model.config)
    with torch.no_grad():
        ours = model(tokens_BL)
        assert float((theirs(tokens_BL).logits - ours).abs().max()) < 1e-5
    if name in ("tiny-moe", "pocket"):
        oracle = ReferenceModel.load(tmp_path / "model")
        assert float((ours[1] - oracle.logits(tokens_BL[1].tolist())).abs().max()) < 1e-5
    back = export.load(tmp_path / "model")
    assert back.config == model.config
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_sizes_are_what_the_model_card_says() -> None:
    for config in CONFIGS.values():
        assert sum(p.numel() for p in PocketMoe(config).parameters()) == config.parameters()
    assert POCKET.parameters() * 2 < 22e6
    assert speculator(POCKET).parameters() * 2 < 3e6


def test_documents_of_a_row_do_not_see_each_other() -> None:
    model = lively(tiny())
    tokens_BL, positions_BL = two_documents(model.config)
    with torch.no_grad():
        packed = model(tokens_BL, positions_BL)[0]
        apart = torch.cat([model(tokens_BL[:1, :20])[0], model(tokens_BL[:1, 20:])[0]])
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=0)


def test_next_tokens_stay_within_documents_and_leave_padding_out() -> None:
    tokens_BL = torch.tensor([[5, 6, 0, 7, 0, 3, 3]])
    positions_BL = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    expected = [[6, 0, NO_TARGET, 0, NO_TARGET, NO_TARGET, NO_TARGET]]
    assert next_tokens(tokens_BL, positions_BL, pad_id=3).tolist() == expected


@pytest.mark.parametrize("config", [tiny(), tiny("llama")], ids=["moe", "dense"])
def test_both_ways_through_loss_and_experts_have_the_same_gradients(config: PocketConfig) -> None:
    tokens_BL, positions_BL = two_documents(config)
    weights_BL = torch.rand(tokens_BL.shape, generator=torch.Generator().manual_seed(3))
    batch = Batch(tokens_BL=tokens_BL, positions_BL=positions_BL, weights_BL=weights_BL)
    gradients = []
    for options in (Options(chunk_rows=0, product="parallel_linear"), Options(chunk_rows=40)):
        model = lively(config, options=options).train()
        losses = model.loss(batch)
        torch.autograd.backward(losses.cross_entropy + losses.balance + losses.z)
        gradients.append([p.grad for p in model.parameters()])
    for plain, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, plain, atol=1e-6, rtol=1e-4)


def test_the_loss_is_the_mean_of_the_token_losses() -> None:
    model = lively(tiny())
    tokens_BL, positions_BL = two_documents(model.config)
    losses_BL = model.token_losses(tokens_BL, positions_BL)
    expected = F.cross_entropy(model(tokens_BL[:1, :20])[0, :-1], tokens_BL[0, 1:20], reduction="none")
    torch.testing.assert_close(losses_BL[0, :19], expected, atol=1e-5, rtol=0)
    mean = losses_BL.sum() / (next_tokens(tokens_BL, positions_BL, pad_id=3) != NO_TARGET).sum()
    loss = model.loss(Batch(tokens_BL=tokens_BL, positions_BL=positions_BL)).cross_entropy
    torch.testing.assert_close(loss, mean)


def test_balance_is_one_where_experts_share_evenly_and_grows_where_they_do_not() -> None:
    model = lively(tiny())
    tokens_BL, positions_BL = two_documents(model.config)
    batch = Batch(tokens_BL=tokens_BL, positions_BL=positions_BL)
    with torch.no_grad():
        for _, mlp in model.moe_layers():
            mlp.router.zero_()
            mlp.choose = lambda logits_TE: (
                (torch.arange(len(logits_TE)).unsqueeze(1) + torch.tensor([0, 4])) % 8,
                torch.full((len(logits_TE), 2), 0.5),
            )
        even = model.loss(batch)
    with torch.no_grad():
        uneven = lively(tiny()).loss(batch)
    assert float(even.balance) == pytest.approx(1)
    assert float(even.peak) == 1
    assert float(uneven.balance) > 1.05
    assert float(uneven.peak) > 1.2


def test_padding_does_not_count_in_the_routers_losses() -> None:
    model = lively(tiny())
    tokens_BL, positions_BL = two_documents(model.config)
    tokens_BL, positions_BL = tokens_BL[:1, :20], positions_BL[:1, :20]
    padding = torch.full((1, 12), model.config.pad_token_id)
    padded = Batch(
        tokens_BL=torch.cat([tokens_BL, padding], 1), positions_BL=torch.cat([positions_BL, torch.arange(12)[None]], 1)
    )
    with torch.no_grad():
        alone = model.loss(Batch(tokens_BL=tokens_BL, positions_BL=positions_BL))
        torch.testing.assert_close(model.loss(padded), alone)
        counted = router_losses(model._run(padded.tokens_BL, padded.positions_BL, None, None)[1], torch.ones(32) > 0)
    assert abs(float(counted[0] - alone.balance)) > 0.01


def test_an_observer_sees_each_layers_choice() -> None:
    model = lively(tiny())
    tokens_BL, positions_BL = two_documents(model.config)
    seen: list[tuple[int, Tensor, Tensor]] = []
    model(tokens_BL, positions_BL, observer=lambda *choice: seen.append(choice))
    assert [layer for layer, _, _ in seen] == [0, 1]
    for _, ids_TK, weights_TK in seen:
        assert ids_TK.shape == weights_TK.shape == (96, 2)
        torch.testing.assert_close(weights_TK.sum(1), torch.ones(96))


def test_the_router_and_the_experts_can_be_replaced() -> None:
    model = lively(tiny(hidden_size=128, moe_intermediate_size=128))
    tokens_BL, _ = two_documents(model.config)
    with torch.no_grad():
        exact = model(tokens_BL)
        for _, mlp in model.moe_layers():
            held = mlp.experts
            assert isinstance(held, torch.nn.Module)
            w_in, w_out = (mk.quantize_experts(w, 8) for w in (held.w_in, held.w_out))
            mlp.experts = lambda x, ids, weights, plan, w=(w_in, w_out): mk.fused_moe(x, *w, ids, weights, plan=plan)
        quantised = model(tokens_BL)
        for _, mlp in model.moe_layers():
            mlp.choose = lambda logits_TE, choose=mlp.choose: choose(logits_TE.roll(1, 1))
        shuffled = model(tokens_BL)
    assert 0 < float((quantised - exact).abs().max()) < 0.05
    assert float((shuffled - exact).abs().max()) > 0.1


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3", "llama"])
def test_configurations_survive_json(model_type: ModelType) -> None:
    config = tiny(model_type, rope_theta=500.0)
    assert PocketConfig.from_json(json.loads(json.dumps(config.to_json("float32")))) == config


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"head_dim": 15}, {"num_experts_per_tok": 9}])
def test_configurations_that_contradict_themselves_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(PocketError):
        tiny(**changes)


def test_a_folder_is_written_whole_or_not_at_all_and_a_damaged_one_is_named(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with pytest.raises(PocketError, match="cannot be read"):
        export.load(out)
    with pytest.raises(PocketError, match="tokenizer"):
        export.save(lively(tiny()), tmp_path / "nowhere", out)
    with pytest.raises(PocketError, match="ids up to 63"):
        export.save(lively(tiny(vocab_size=60)), work / "tokenizer", out)
    assert list(tmp_path.iterdir()) == []
    export.save(lively(tiny()), work / "tokenizer", out)
    (out / "leftover.safetensors").touch()
    export.save(lively(tiny("llama")), work / "tokenizer", out)
    assert not (out / "leftover.safetensors").exists()
    assert export.load(out).config.model_type == "llama"
    assert list(tmp_path.iterdir()) == [out]
    (out / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(PocketError, match="cannot be read"):
        export.load(out)


def test_starts_of_documents_are_found_without_reading_values() -> None:
    positions_BL = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert _starts(positions_BL, None).tolist() == [0, 3, 5, 10]
    assert _starts(positions_BL, 6).tolist() == [0, 3, 5, 10, 10, 10, 10]
