"""What holds of fused_moe for every input, whichever way through: order, absence, emptiness, linearity, NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.moe_layers import DTYPES, exact_layer, random_layer
from testkit.models.tolerances import assert_close

from moe_kernels import plan

pytestmark = pytest.mark.usefixtures("regime")

few_examples = settings(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 4])
def test_exact_experts_combine_exactly(slots: int, rows: int, dtype: torch.dtype) -> None:
    layer = exact_layer(rows, slots=slots, dtype=dtype)
    assert torch.equal(layer().double(), layer.expected())


@given(st.integers(0, 20), st.integers(1, 6), st.data(), seeds)
@few_examples
def test_any_draw_of_ids_is_exact(rows: int, experts: int, data: st.DataObject, seed: int) -> None:
    """Repeated experts, absent ones, ids outside the range; weights of both signs and above one."""
    slots = data.draw(st.integers(1, experts))
    layer = exact_layer(rows, experts=experts, slots=1, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    layer = layer.but(
        ids_TK=torch.randint(-2, experts + 2, (rows, slots), generator=generator),
        weights_TK=torch.randint(-8, 17, (rows, slots), generator=generator) / 8,
    )
    assert torch.equal(layer().double(), layer.expected())


def test_sum_runs_in_slot_order(rows: int) -> None:
    """Exactly, to the bit: the outputs of single slots, weighted and added one after the other in float32."""
    layer = exact_layer(rows, experts=6, slots=6)
    layer = layer.but(weights_TK=torch.rand(rows, 6, generator=torch.Generator().manual_seed(2)))
    expected_TD = torch.zeros_like(layer.x_TD)
    one = torch.ones(rows, 1)
    for slot in range(6):
        out_TD = layer.but(ids_TK=layer.ids_TK[:, slot : slot + 1], weights_TK=one)()
        expected_TD = expected_TD + out_TD * layer.weights_TK[:, slot : slot + 1]
    assert torch.equal(layer(), expected_TD)


@pytest.mark.parametrize("expert", [0, 4])
def test_all_tokens_on_one_expert(rows: int, expert: int) -> None:
    """The other experts' weights are NaN: nobody reads them."""
    layer = exact_layer(rows, slots=1)
    w_in, w_down = (torch.full_like(weight, torch.nan) for weight in (layer.w_in, layer.w_down))
    w_in[expert], w_down[expert] = layer.w_in[expert], layer.w_down[expert]
    alone = layer.but(ids_TK=torch.full_like(layer.ids_TK, expert), w_in=w_in, w_down=w_down)
    assert torch.equal(alone().double(), layer.but(ids_TK=alone.ids_TK).expected())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize(
    ("name", "column", "bad"), [("x_TD", 0, torch.nan), ("x_TD", 5, torch.inf), ("weights_TK", 1, torch.nan)]
)
def test_nan_and_inf_stay_in_their_row(rows: int, name: str, column: int, bad: float) -> None:
    """Rows end within a tile, which would read the next row's first column next."""
    layer = random_layer(rows, width=20, slots=3)
    at = rows // 2
    odd = getattr(layer, name).clone()
    odd[at, column] = bad
    y_TD = layer.but(**{name: odd})()
    others = torch.arange(rows) != at
    assert torch.equal(y_TD[others], layer()[others])
    assert y_TD[at].isnan().all() if name == "weights_TK" else not y_TD[at].isfinite().all()


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_absent_slots_contribute_nothing(rows: int, weights_on: str) -> None:
    """Not even where their weight is NaN or the whole row is."""
    layer = random_layer(rows, slots=3, biased=True).but(weights_on=weights_on)
    ids_TK, weights_TK, x_TD = layer.ids_TK.clone(), layer.weights_TK.clone(), layer.x_TD.clone()
    ids_TK[:, 1], weights_TK[:, 1] = -1, torch.nan
    ids_TK[-1], x_TD[-1] = -1, torch.nan
    y_TD = layer.but(ids_TK=ids_TK, weights_TK=weights_TK, x_TD=x_TD)()
    assert_close(y_TD, layer.but(ids_TK=ids_TK).expected())
    assert (y_TD[-1] == 0).all()


def test_no_slot_is_here(rows: int) -> None:
    layer = random_layer(rows)
    assert (layer.but(ids_TK=torch.full_like(layer.ids_TK, -1))() == 0).all()


@pytest.mark.parametrize(
    "outside", [[5, -2, 2**31 - 1, -(2**31)], [6, 2**31, 2**32 + 1, -(2**40)]], ids=["int32", "int64"]
)
def test_ids_outside_the_range_are_elsewhere(rows: int, outside: list[int]) -> None:
    layer = exact_layer(rows, slots=5)
    ids_TK = layer.ids_TK.clone()
    ids_TK[:, 1:] = torch.tensor(outside)
    assert torch.equal(layer.but(ids_TK=ids_TK)().double(), layer.but(ids_TK=ids_TK).expected())


def test_int32_ids_are_the_same(rows: int) -> None:
    layer = random_layer(rows)
    assert torch.equal(layer.but(ids_TK=layer.ids_TK.int())(), layer())


def test_shards_of_the_experts_add_up(rows: int) -> None:
    """Experts 1, 4 here and 0, 2, 3 there: ids are the layer's, the table says where each lies."""
    layer = exact_layer(rows, slots=3)
    total_TD = torch.zeros_like(layer.x_TD)
    for held in ([1, 4], [3, 0, 2]):
        local_E = torch.full((5,), -1, dtype=torch.int32)
        local_E[held] = torch.arange(len(held), dtype=torch.int32)
        total_TD += layer.but(w_in=layer.w_in[held], w_down=layer.w_down[held])(local_E=local_E)
    assert torch.equal(total_TD, layer())


def test_a_shard_may_hold_fewer_experts_than_slots(rows: int) -> None:
    layer = exact_layer(rows, slots=4)
    shard = layer.but(w_in=layer.w_in[:2], w_down=layer.w_down[:2])
    assert torch.equal(shard().double(), shard.expected())


def test_rows_that_are_not_kept_cost_nothing(rows: int) -> None:
    layer = exact_layer(rows, slots=3)
    keep_T = torch.arange(rows) % 2 == 1
    layer = layer.but(x_TD=layer.x_TD.masked_fill(~keep_T[:, None], torch.nan))
    y_TD = layer(keep_T=keep_T)
    assert torch.equal(y_TD[keep_T], layer()[keep_T])
    assert (y_TD[~keep_T] == 0).all()


def test_a_plan_made_before_is_the_same(rows: int) -> None:
    layer = random_layer(rows, slots=3)
    assert_close(layer(plan=plan(layer.ids_TK, 5)), layer())


def test_twice_gives_the_same_bits(rows: int) -> None:
    layer = random_layer(rows, slots=4, dtype=torch.float16)
    assert torch.equal(layer(), layer())


def test_inputs_are_not_written_to(rows: int) -> None:
    layer = random_layer(rows, biased=True)
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    layer()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors().items())
