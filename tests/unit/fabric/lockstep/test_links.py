"""What ranks in lock-step send, and what follows when one dies or lags: counted messages, typed errors, no publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from testkit.fabric.lockstep import Ranks, dealt_link, shared_ranks
from torch import Tensor

from services.errors import ConfigError, LockstepBroken
from services.fabric.lockstep.build import LockstepShape
from services.fabric.lockstep.routes import LockstepRoutes
from services.model.experts import ExpertWeights
from services.placement import place_experts

HIDDEN = 8
EXPERTS = 16
BROKE = "The lock-step group failed while"
ROW_BYTES = HIDDEN * 4


def experts(width: int = 4) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    return ExpertWeights(
        expert_ids=tuple(range(EXPERTS)),
        w_gate_up_E2FD=torch.randn(EXPERTS, 2 * width, HIDDEN, generator=generator),
        w_down_EDF=torch.randn(EXPERTS, HIDDEN, width, generator=generator),
    )


def rows(count: int, slots: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    ids_TK = torch.rand(count, EXPERTS, generator=generator).topk(slots, dim=1).indices
    return torch.randn(count, HIDDEN, generator=generator), ids_TK, torch.rand(count, slots, generator=generator)


def sent(ranks: Ranks) -> dict[str, int]:
    """By all ranks since they were made."""
    return {
        f"{kind} {scope}": sum(getattr(wire.traffic, kind)[scope] for wire in ranks.wires)
        for kind in ("messages", "bytes")
        for scope in ("node", "across")
    }


def one_layer(shape: LockstepShape, counts: list[int], batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, int]:
    """What all ranks send together when rank r has the first ``counts[r]`` rows of the batch."""
    ranks = shared_ranks(shape.nodes)
    before = sent(ranks)
    with dealt_link({0: experts()}, EXPERTS, shape) as link:

        def work(rank: int) -> Tensor:
            part = slice(0, counts[rank])
            one = link.links[rank]
            return one.combine(one.dispatch(0, *(tensor[part] for tensor in batch)))

        ranks.each(work)
    return {key: now - before[key] for key, now in sent(ranks).items()}


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 4)])
def test_messages_per_layer(nodes: int, per_node: int) -> None:
    """Both ways together, of all ranks: O(p) each in flat mode, O(p / L) + O(L) in hierarchical mode."""
    names = tuple(str(node) for node in range(nodes) for _ in range(per_node))
    p, batch = len(names), rows(20)
    flat = one_layer(LockstepShape(nodes=names, way="flat"), [20] * p, batch)
    hierarchical = one_layer(LockstepShape(nodes=names, way="hierarchical"), [20] * p, batch)
    assert flat["messages across"] <= 2 * p * (p - per_node)
    assert flat["messages across"] > 2 * p * (nodes - 1), "the batch is large enough to reach nearly every rank"
    assert hierarchical["messages across"] <= 2 * p * (nodes - 1)
    assert hierarchical["messages node"] <= 4 * p * (per_node - 1)


def test_a_row_crosses_to_a_node_once_and_one_sum_comes_back() -> None:
    """32 rows of one rank that each want four experts on the other node, two on each rank there; 8 that want none."""
    shape = LockstepShape(nodes=("a", "a", "b", "b"), way="hierarchical")
    placed = place_experts({0: [1.0] * EXPERTS}, 4, EXPERTS // 4)[0]
    far = [*placed[2][:2], *placed[3][:2]]
    near = [*placed[0][:2], *placed[1][:2]]
    batch = torch.ones(40, HIDDEN), torch.tensor([far] * 32 + [near] * 8), torch.ones(40, 4)
    found = one_layer(shape, [40, 0, 0, 0], batch)
    slots, lengths = 32 * 4 * 8, 4 * 8
    assert found["bytes across"] == 2 * 32 * ROW_BYTES + slots + lengths
    assert found["messages across"] == 4 + 1, "one from each rank, one with sums"


@contextmanager
def of_their_own(timeout_s: float) -> Iterator[Ranks]:
    ranks = Ranks(("a", "a", "b"), timeout_s=timeout_s)
    try:
        yield ranks
    finally:
        ranks.close()


def outcome(call: Callable[[], object]) -> str:
    """Text alone: the error itself would keep the connections open by its traceback."""
    try:
        call()
    except LockstepBroken as error:
        return error.message
    return "no error"


@pytest.mark.parametrize("way", ["flat", "hierarchical"])
def test_a_rank_that_dies_ends_the_exchange_of_all(way: str) -> None:
    with of_their_own(40) as ranks:
        shape = LockstepShape(nodes=ranks.nodes, way=way)  # type: ignore[arg-type]
        with dealt_link({0: experts()}, EXPERTS, shape, ranks=ranks) as link:
            link.combine(link.dispatch(0, *rows(12)))
            began = time.monotonic()
            ranks.cut(2)
            x_TD, ids_TK, weights_TK = rows(4)

            def survive(rank: int) -> str:
                if rank == 2:
                    return BROKE
                one = link.links[rank]
                error = outcome(lambda: one.combine(one.dispatch(0, x_TD, ids_TK, weights_TK)))
                ranks.cut(rank)  # as its process would, by exiting
                return error

            errors = ranks.each(survive)
        assert all(BROKE in error for error in errors)
        assert time.monotonic() - began < 30, "nobody waited for the deadline"


def test_a_rank_that_lags_meets_the_deadline() -> None:
    with of_their_own(1.0) as ranks:
        shape = LockstepShape(nodes=ranks.nodes, way="flat")
        with dealt_link({0: experts()}, EXPERTS, shape, ranks=ranks) as link:
            late, began = threading.Event(), time.monotonic()
            batch = rows(4)

            def work(rank: int) -> str:
                if rank == 2:
                    late.wait(25)
                    return BROKE
                one = link.links[rank]
                error = outcome(lambda: one.combine(one.dispatch(0, *batch)))
                late.set()
                return error

            errors = ranks.each(work)
        assert all(BROKE in error for error in errors)
        assert "All ranks restart" in errors[0]
        assert time.monotonic() - began < 20


def test_slices_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="3 ranks are not a multiple of 2 expert slices"):
        LockstepShape(nodes=("a", "a", "a"), way="flat", slices=2)
    with (
        pytest.raises(ConfigError, match="width 3"),
        dealt_link({0: experts(3)}, EXPERTS, LockstepShape(nodes=("a", "a", "b", "b"), way="flat", slices=2)),
    ):
        pass


def test_an_expert_that_nobody_holds() -> None:
    shape = LockstepShape(nodes=("a", "b"), way="flat")
    with pytest.raises(ConfigError, match="Expert 1 of layer 7 has no rank"):
        LockstepRoutes({7: {0: (0,), 1: (0,)}}, num_experts=2, topology=shape.topology(0), rank=0)
