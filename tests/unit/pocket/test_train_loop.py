"""One training step: in two precisions, compiled or not, and what its state holds."""

from __future__ import annotations

import pytest
import torch

from pocket_moe.config import tiny
from pocket_moe.corpus.batches import Batch
from pocket_moe.model.model import Options, PocketMoe
from pocket_moe.train.loop import Trainer, TrainSettings
from pocket_moe.train.schedule import Schedule

TOKENS = 4 * 64


def trainer(dtype: torch.dtype = torch.float32, **settings: float) -> Trainer:
    torch.manual_seed(0)
    model = PocketMoe(tiny(), options=Options(chunk_rows=100))
    schedule = Schedule(peak=3e-3, warmup=TOKENS, total=100 * TOKENS)
    return Trainer(model, TrainSettings(schedule=schedule, **settings), dtype=dtype, batch_tokens=TOKENS)  # type: ignore[arg-type]


def batch(step: int) -> Batch:
    """Every word is the last plus one; two documents per row."""
    first = torch.randint(0, 60, (4, 1), generator=torch.Generator().manual_seed(step))
    positions = torch.cat([torch.arange(30), torch.arange(34)])
    return Batch(tokens_BL=4 + (first + torch.arange(64)) % 60, positions_BL=positions.repeat(4, 1))


def losses(trainer: Trainer, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        trainer.step(batch(step))
        found.append(trainer.read().loss)
    return found


def test_bfloat16_learns_as_float32_does() -> None:
    exact, rounded = losses(trainer(), 15), losses(trainer(torch.bfloat16), 15)
    assert exact[-1] < exact[0] - 0.8
    assert rounded == pytest.approx(exact, abs=0.01)


def test_masters_stay_in_float32_and_the_copy_follows() -> None:
    mixed = trainer(torch.bfloat16)
    losses(mixed, 3)
    for master, copy in zip(mixed.model.parameters(), mixed.compute.parameters(), strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(copy, master.to(torch.bfloat16))
    assert any(not torch.equal(p, p.to(torch.bfloat16).float()) for p in mixed.model.parameters())


def test_statistics_are_means_since_they_were_read() -> None:
    one, other = trainer(), trainer()
    apart = losses(one, 4)
    for step in range(4):
        other.step(batch(step))
    assert other.read().loss == pytest.approx(sum(apart) / 4)


def test_weight_decay_spares_the_norms() -> None:
    made = trainer()
    decay = {id(p): group["weight_decay"] for group in made.optimizer.param_groups for p in group["params"]}
    assert {decay[id(p)] for name, p in made.model.named_parameters() if "norm" in name} == {0.0}
    assert {decay[id(p)] for name, p in made.model.named_parameters() if "norm" not in name} == {0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_uses_the_average_and_puts_the_weights_back(dtype: torch.dtype) -> None:
    made = trainer(dtype, average=0.5)
    losses(made, 3)
    before = [p.clone() for p in made.compute.parameters()]
    with made.evaluating() as model:
        for parameter, average, weight in zip(model.parameters(), made.average, before, strict=True):
            assert torch.equal(parameter, average.to(dtype))
            assert parameter.dim() == 1 or not torch.equal(parameter, weight)
    assert all(torch.equal(p, weight) for p, weight in zip(made.compute.parameters(), before, strict=True))


def test_targets_and_weights_of_a_batch_decide_its_loss() -> None:
    model = trainer().model
    given = batch(0)
    targets = torch.full_like(given.tokens_BL, -100)
    targets[0, 5], targets[1, 7] = 9, 11
    weights = torch.zeros(targets.shape)
    weights[0, 5], weights[1, 7] = 3.0, 1.0
    mine = Batch(tokens_BL=given.tokens_BL, positions_BL=given.positions_BL, targets_BL=targets, weights_BL=weights)
    nats = model.token_losses(given.tokens_BL, given.positions_BL, targets_BL=targets)
    assert int((nats != 0).sum()) == 2
    expected = 0.75 * nats[0, 5] + 0.25 * nats[1, 7]
    torch.testing.assert_close(model.loss(mine).cross_entropy, expected)
