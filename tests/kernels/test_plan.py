"""plan, reference and interpreted kernels, against a plan made pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import ArgumentError, backend
from moe_kernels.plan.op import plan
from moe_kernels.plan.types import Plan

SORTS: dict[str, dict[str, Any]] = {
    "one_launch": {"small": (1024, 4)},
    "one_launch_in_blocks": {"small": (32, 4)},
    "three_launches": {"small_pairs": 0, "large": (64, 4)},
}


def plan_by(sort: str, ids_TK: Tensor, experts: int, **flags: Any) -> Plan:
    """The reference, or one of the kernels' ways with blocks small enough for a test."""
    if sort == "reference":
        return plan(ids_TK, experts, **flags)
    from moe_kernels.plan import launch as plan_launch

    given_flags = {"block_rows": 128, "capacity": None, "first_come": "token", "keep_T": None, "local_E": None} | flags
    return plan_launch.launch(ids_TK, experts, **given_flags, **SORTS[sort])


def pair_by_pair(
    ids: list[list[int]],
    experts: int,
    *,
    block_rows: int = 128,
    capacity: int | None = None,
    first_come: str = "token",
    keep: list[bool] | None = None,
    local: list[int] | None = None,
) -> dict[str, list[int]]:
    """The definition: every pair walks to its expert, which takes it or not."""
    slots = len(ids[0])
    pairs = [(row, slot) for row in range(len(ids)) for slot in range(slots)]
    queues: list[list[int]] = [[] for _ in range(experts)]
    dropped = 0
    for row, slot in pairs if first_come == "token" else sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        expert = ids[row][slot]
        if local is not None:
            expert = local[expert] if 0 <= expert < len(local) else -1
        if not 0 <= expert < experts or (keep is not None and not keep[row]):
            continue
        if capacity is not None and len(queues[expert]) >= capacity:
            dropped += 1
        else:
            queues[expert].append(row * slots + slot)
    taken = [pair for queue in queues for pair in sorted(queue)]
    order = taken + sorted(set(range(len(pairs))) - set(taken))
    place = [-1] * len(pairs)
    for position, pair in enumerate(taken):
        place[pair] = position
    ends = [sum(map(len, queues[: expert + 1])) for expert in range(experts)]
    tiles = [
        (expert, row)
        for expert, queue in enumerate(queues)
        for row in range(ends[expert] - len(queue), ends[expert], block_rows)
    ]
    padding = [-1] * (-(-len(pairs) // block_rows) + min(experts, len(pairs)) - len(tiles))
    return {
        "order_S": order,
        "place_S": place,
        "ends_E": ends,
        "tile_expert_M": [expert for expert, _ in tiles] + padding,
        "tile_row_M": [row for _, row in tiles] + padding,
        "tile_count_1": [len(tiles)],
        "dropped_1": [dropped],
    }


def assert_is(made: Plan, expected: dict[str, list[int]]) -> None:
    for name, values in expected.items():
        tensor = getattr(made, name)
        assert tensor.dtype == torch.int32, name
        assert tensor.tolist() == values, name


sorts = pytest.mark.parametrize("sort", ["reference", *SORTS])


@st.composite
def requests(draw: st.DrawFn, rows: int, experts: int = 9) -> dict[str, Any]:
    rows, slots = draw(st.integers(1, rows)), draw(st.integers(1, 4))
    here = draw(st.integers(1, experts))
    known = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-2, max(here, known) + 2, (rows, slots), generator=generator)
    return {
        "ids_TK": ids_TK.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        "experts": here,
        "block_rows": draw(st.sampled_from([1, 2, 3, 16])),
        "capacity": draw(st.none() | st.integers(0, 8)),
        "first_come": draw(st.sampled_from(["token", "slot"])),
        "keep_T": draw(st.none() | st.just(torch.rand(rows, generator=generator) < 0.7)),
        "local_E": draw(st.none() | st.just(torch.randint(-1, here, (known,), generator=generator, dtype=torch.int32))),
    }


def expected_of(request: dict[str, Any]) -> dict[str, list[int]]:
    flags = {name: request[name] for name in ("block_rows", "capacity", "first_come")}
    keep, local = request["keep_T"], request["local_E"]
    return pair_by_pair(
        request["ids_TK"].tolist(),
        request["experts"],
        keep=None if keep is None else keep.tolist(),
        local=None if local is None else local.tolist(),
        **flags,
    )


@given(requests(rows=40))
@settings(max_examples=150, deadline=None)
def test_twin_is_the_definition(request_: dict[str, Any]) -> None:
    assert_is(plan(**request_), expected_of(request_))


@pytest.mark.parametrize("sort", SORTS)
@given(request_=requests(rows=30))
@settings(max_examples=25, deadline=None)
def test_kernels_are_the_definition(sort: str, request_: dict[str, Any]) -> None:
    assert_is(plan_by(sort, **request_), expected_of(request_))


@sorts
@pytest.mark.parametrize(
    ("rows", "slots", "experts", "block_rows"), [(1, 8, 128, 128), (13, 8, 60, 4), (50, 2, 8, 16), (9, 3, 512, 2)]
)
def test_shapes_of_models(sort: str, rows: int, slots: int, experts: int, block_rows: int) -> None:
    ids_TK = torch.rand(rows, experts, generator=torch.Generator().manual_seed(0)).topk(slots, dim=1).indices
    expected = pair_by_pair(ids_TK.tolist(), experts, block_rows=block_rows)
    assert_is(plan_by(sort, ids_TK, experts, block_rows=block_rows), expected)


@sorts
def test_example_of_the_docstring(sort: str) -> None:
    ids_TK = torch.tensor([[1, 0], [1, 7], [0, 1]])
    made = plan_by(sort, ids_TK, 2, block_rows=2)
    assert made.order_S.tolist() == [1, 4, 0, 2, 5, 3]
    assert made.place_S.tolist() == [2, 0, 3, -1, 1, 4]
    assert made.ends_E.tolist() == [2, 5]
    assert made.tile_expert_M.tolist() == [0, 1, 1, -1, -1]
    assert made.tile_row_M.tolist() == [0, 2, 4, -1, -1]
    assert (made.slots, made.block_rows, made.tile_count_1.item()) == (2, 2, 3)
    dropping = plan_by(sort, ids_TK, 2, block_rows=2, capacity=2)
    assert dropping.order_S.tolist() == [1, 4, 0, 2, 3, 5]
    assert dropping.ends_E.tolist() == [2, 4]
    assert dropping.dropped_1.tolist() == [1]
    assert plan_by(sort, ids_TK, 2, capacity=1, first_come="slot").order_S.tolist() == [4, 0, 1, 2, 3, 5]


@sorts
@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_on_one_expert(sort: str, expert: int) -> None:
    made = plan_by(sort, torch.full((70, 1), expert), 4, block_rows=16)
    assert made.order_S.tolist() == list(range(70))
    assert made.tile_row_M.tolist() == [0, 16, 32, 48, 64, -1, -1, -1, -1]
    assert made.tile_expert_M.tolist() == [expert] * 5 + [-1] * 4


@sorts
def test_ids_beyond_32_bits_are_elsewhere(sort: str) -> None:
    made = plan_by(sort, torch.tensor([[2**32, 1], [-(2**32), 0]]), 2)
    assert made.place_S.tolist() == [-1, 1, -1, 0]


@sorts
def test_ids_of_any_stride(sort: str) -> None:
    wide = torch.randint(0, 5, (12, 6), generator=torch.Generator().manual_seed(0))
    for strided in (wide[:, 1:4], wide.t()[:4], wide[::3]):
        assert_is(plan_by(sort, strided, 5, block_rows=4), pair_by_pair(strided.tolist(), 5, block_rows=4))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("flags", [{}, {"capacity": 2}, {"capacity": 2, "first_come": "slot"}], ids=str)
def test_no_rows(flags: dict[str, Any]) -> None:
    made = plan(torch.zeros(0, 2, dtype=torch.int64), 3, **flags)
    assert made.ends_E.tolist() == [0, 0, 0]
    assert (made.tile_count_1.tolist(), made.dropped_1.tolist()) == ([0], [0])
    assert made.order_S.shape == made.place_S.shape == made.tile_row_M.shape == (0,)


def test_forced_kernels_are_what_plan_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_kernels.plan import launch as plan_launch

    launches: list[int] = []
    launch = plan_launch.launch
    monkeypatch.setattr(plan_launch, "launch", lambda *given: (launches.append(1), launch(*given))[1])
    ids_TK = torch.tensor([[1, 0], [1, 2], [0, 2]])
    for flags in ({}, {"capacity": 1}, {"capacity": 1, "first_come": "slot"}, {"block_rows": 1}):
        with backend.forced("torch"):
            wanted = plan(ids_TK, 3, **flags)
        with backend.forced("triton"):
            made = plan(ids_TK, 3, **flags)
        assert launches.pop() == 1
        assert made.order_S.tolist() == wanted.order_S.tolist()
        assert made.dropped_1.tolist() == wanted.dropped_1.tolist()


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("ids", "experts", "flags", "words"),
    [
        (IDS[0], 4, {}, r"ids must be \[T, K\], found torch.int64 of shape \(3,\)"),
        (IDS[:, :0], 4, {}, r"ids must be \[T, K\]"),
        (IDS.float(), 4, {}, "ids must be int32 or int64"),
        (IDS, 0, {}, "experts must be at least 1, found 0"),
        (IDS, 4, {"block_rows": 0}, "block_rows must be at least 1"),
        (IDS, 4, {"capacity": -1}, "capacity must not be negative"),
        (IDS, 4, {"first_come": "expert"}, "first_come must be token or slot"),
        (IDS, 4, {"keep_T": torch.ones(3, dtype=torch.bool)}, r"keep \[T\] must be torch.bool of shape \(2,\)"),
        (IDS, 4, {"keep_T": torch.ones(2, dtype=torch.bool, device="meta")}, "keep is on meta, ids on cpu"),
        (IDS, 4, {"local_E": torch.zeros(4)}, r"local must be \[global experts\] of torch.int32"),
        (IDS, 4, {"local_E": torch.zeros(4, dtype=torch.int32, device="meta")}, "local is on meta, ids on cpu"),
    ],
)
def test_wrong_arguments_are_named(ids: Tensor, experts: int, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        plan(ids, experts, **flags)
