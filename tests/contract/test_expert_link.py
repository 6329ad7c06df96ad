"""What every ExpertLink promises. An implementation joins by one entry in ``IMPLEMENTATIONS``; those between GPUs, in
``BETWEEN_GPUS``, run where there are GPUs (``make gpu-test``) and skip elsewhere.

Moving rows is exact to the bit: the experts here scale a row by a whole number, in steps that float32 computes without
rounding, so whatever differs comes from the link and from the sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from testkit.fabric.lockstep import dealt_link
from testkit.fabric.shared_memory import SLOTS, shared_link
from testkit.fabric.tcp import tcp_link
from testkit.gpu.fabric import GpuLinks, gpu_links
from testkit.gpu.recorded_graph import record
from torch import Tensor

from moe_kernels import reference
from services.fabric.link import ExpertLink
from services.fabric.local import LocalLink
from services.fabric.lockstep.build import LockstepShape
from services.model.experts import ExpertShard, ExpertWeights

EXPERTS = 8
HIDDEN = 16
OpenLink = Callable[[Mapping[int, ExpertWeights]], AbstractContextManager[ExpertLink[Any]]]


@contextmanager
def local(layers: Mapping[int, ExpertWeights]) -> Iterator[ExpertLink[Any]]:
    yield LocalLink(ExpertShard(layers, num_experts=EXPERTS).by_layer(), num_experts=EXPERTS)


def tcp(replicas: Sequence[int], **options: Any) -> OpenLink:
    """Groups with so many seats each."""
    return lambda layers: tcp_link(layers, EXPERTS, replicas, **options)


IMPLEMENTATIONS: dict[str, OpenLink] = {"local": local, "tcp": tcp([1]), "tcp-3-workers": tcp([2, 1])}
IMPLEMENTATIONS["tcp-reduced"] = tcp([2], reduced=True)  # one group: across groups it adds in another order
IMPLEMENTATIONS["lane-3-workers"] = tcp([2, 1], lane="gloo")
IMPLEMENTATIONS["lane-reduced"] = tcp([2], reduced=True, lane="gloo")
IMPLEMENTATIONS["shared"] = lambda layers: shared_link(layers, EXPERTS, [2, 1])
IMPLEMENTATIONS["shared-summed"] = lambda layers: shared_link(layers, EXPERTS, [2], unsummed=False)


def lockstep(nodes: str, way: Any, slices: int = 1, pairs: int = 0, slots: int | None = None) -> OpenLink:
    """One rank per letter, on the node of that name."""
    shape = LockstepShape(nodes=tuple(nodes), way=way, slices=slices, pairs=pairs)
    return lambda layers: dealt_link(layers, EXPERTS, shape, slots=slots)


IMPLEMENTATIONS |= {
    "lockstep-flat": lockstep("aabb", "flat"),
    "lockstep-flat-replicas": lockstep("aab", "flat", slots=4),
    "lockstep-hierarchical": lockstep("aabb", "hierarchical"),
    "lockstep-hierarchical-one-pair": lockstep("aabb", "hierarchical", pairs=1),
    "lockstep-hierarchical-irregular": lockstep("abbbc", "hierarchical", slots=3),
    "lockstep-sliced": lockstep("aabb", "flat", slices=2),
    "lockstep-sliced-hierarchical": lockstep("aaaabbbb", "hierarchical", slices=2),
}
IN_ANOTHER_ORDER = [link for name, link in IMPLEMENTATIONS.items() if "hierarchical" in name]
"""These add partial sums: exact where every sum is."""


BETWEEN_GPUS = [
    pytest.param((name, gpus), marks=pytest.mark.gpu, id=f"{name}-{gpus}-gpus")
    for gpus in (2, 4)
    for name in gpu_links(EXPERTS)
]


@pytest.fixture(scope="module", params=[*IMPLEMENTATIONS, *BETWEEN_GPUS])
def open_link(request: pytest.FixtureRequest) -> Iterator[OpenLink]:
    if isinstance(request.param, str):
        yield IMPLEMENTATIONS[request.param]
        return
    name, gpus = request.param
    links = gpu_links(EXPERTS)[name](request.getfixturevalue("gpu_pools")(gpus))
    yield links
    links.close()


def scaling_experts(scales: list[int], dtype: torch.dtype = torch.float32) -> ExpertWeights:
    """Expert e returns ``scales[e]`` times a row whose first element is 1: the gate is 128, whose silu is 128."""
    w_gate_up_E2FD = torch.zeros(EXPERTS, 2 * HIDDEN, HIDDEN)
    w_gate_up_E2FD[:, :HIDDEN, 0] = 128
    w_gate_up_E2FD[:, HIDDEN:] = torch.eye(HIDDEN)
    w_down_EDF = torch.stack([torch.eye(HIDDEN) * scale / 128 for scale in scales])
    return ExpertWeights(
        expert_ids=tuple(range(EXPERTS)), w_gate_up_E2FD=w_gate_up_E2FD.to(dtype), w_down_EDF=w_down_EDF.to(dtype)
    )


def random_experts(seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    return ExpertWeights(
        expert_ids=tuple(range(EXPERTS)),
        w_gate_up_E2FD=torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, generator=generator) / 4,
        w_down_EDF=torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 4,
    )


def whole_rows(rows: int, seed: int) -> Tensor:
    """Small whole numbers, 1 in front."""
    x_TD = torch.randint(-8, 9, (rows, HIDDEN), generator=torch.Generator().manual_seed(seed)).float()
    x_TD[:, 0] = 1
    return x_TD


def choice(rows: int, slots: int, seed: int) -> tuple[Tensor, Tensor]:
    """Distinct expert ids and weights that no power of two divides evenly."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(rows, EXPERTS, generator=generator).topk(slots, dim=1).indices
    return ids_TK, torch.rand(rows, slots, generator=generator)


def slot_order_sum(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, scales: list[int]) -> Tensor:
    y_TD = torch.zeros_like(x_TD)
    for slot in range(ids_TK.shape[1]):
        scale_T1 = torch.tensor([0, *scales]).float()[ids_TK[:, slot] + 1].unsqueeze(1)
        y_TD = y_TD + scale_T1 * x_TD * weights_TK[:, slot : slot + 1]
    return y_TD


def assert_same(open_link: OpenLink, found_TD: Tensor, expected_TD: Tensor) -> None:
    if open_link in IN_ANOTHER_ORDER or getattr(open_link, "another_order", False):
        torch.testing.assert_close(found_TD, expected_TD, atol=1e-4, rtol=1e-5)
    else:
        assert torch.equal(found_TD, expected_TD)


def assert_sum(open_link: OpenLink, found_TD: Tensor, batch: tuple[Tensor, Tensor, Tensor], scales: list[int]) -> None:
    """``found_TD`` is the sum in slot order; between GPUs that of LocalLink there, whose kernels may round once where a
    CPU rounds twice."""
    expected_TD = slot_order_sum(*batch, scales)
    if isinstance(open_link, GpuLinks):
        local_TD = open_link.local(scaling_experts(scales), *batch)
        torch.testing.assert_close(local_TD, expected_TD, atol=1e-4, rtol=1e-5)
        x_TD, ids_TK, weights_TK = batch
        terms_TD = slot_order_sum(x_TD.abs(), ids_TK, weights_TK.abs(), [abs(scale) for scale in scales])
        open_link.compare(found_TD, local_TD, terms_TD)
    else:
        assert_same(open_link, found_TD, expected_TD)


def examples(count: int) -> settings:
    """Between GPUs, where one takes much longer, fewer."""
    if os.environ["TRITON_INTERPRET"] == "1":
        return settings(max_examples=count, deadline=None)
    return settings(max_examples=count // 5, deadline=None, phases=[Phase.explicit, Phase.generate])


SCALES = [1, -2, 3, 5, -7, 11, 13, -17]


@given(
    st.integers(0, 40), st.integers(0, 2), st.integers(0, 2**31), st.sampled_from(["float32", "bfloat16", "float16"])
)
@examples(80)
def test_identity_experts_return_the_rows(
    open_link: OpenLink, rows: int, log_slots: int, seed: int, dtype_name: str
) -> None:
    dtype, slots = getattr(torch, dtype_name), 2**log_slots
    x_TD, (ids_TK, _) = whole_rows(rows, seed).to(dtype), choice(rows, slots, seed)
    with open_link({0: scaling_experts([1] * EXPERTS, dtype)}) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, torch.full((rows, slots), 1 / slots)))
    assert y_TD.dtype == dtype
    assert torch.equal(y_TD, x_TD)


@given(st.integers(1, 40), st.integers(0, 2**31))
@examples(20)
def test_identity_experts_return_the_rows_by_uneven_dyadic_weights(open_link: OpenLink, rows: int, seed: int) -> None:
    x_TD, (ids_TK, _) = whole_rows(rows, seed), choice(rows, 4, seed)
    weights_TK = torch.tensor([0.5, 0.25, 0.125, 0.125]).expand(rows, 4)
    with open_link({0: scaling_experts([1] * EXPERTS)}) as link:
        assert torch.equal(link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK)), x_TD)


@given(st.integers(1, 40), st.integers(1, EXPERTS), st.integers(0, 2**31))
@examples(80)
def test_combine_sums_in_slot_order(open_link: OpenLink, rows: int, slots: int, seed: int) -> None:
    x_TD, (ids_TK, weights_TK) = whole_rows(rows, seed), choice(rows, slots, seed)
    with open_link({3: scaling_experts(SCALES)}) as link:
        y_TD = link.combine(link.dispatch(3, x_TD, ids_TK, weights_TK))
    assert_sum(open_link, y_TD, (x_TD, ids_TK, weights_TK), SCALES)


def test_arithmetic_equals_the_loop(open_link: OpenLink) -> None:
    experts = random_experts(1)
    x_TD, (ids_TK, weights_TK) = torch.randn(30, HIDDEN), choice(30, 3, seed=2)
    with open_link({0: experts}) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
    expected_TD = reference.fused_moe(x_TD, experts.w_gate_up_E2FD, experts.w_down_EDF, ids_TK, weights_TK)
    torch.testing.assert_close(y_TD, expected_TD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first_in_first_out", [True, False])
def test_two_handles_in_flight(open_link: OpenLink, first_in_first_out: bool) -> None:
    """Micro-batches of different sizes, on the same layer and on two layers, combined in either order."""
    batches = [(layer, whole_rows(rows, rows), *choice(rows, 3, rows)) for layer, rows in ((0, 5), (0, 12), (1, 7))]
    scales = {0: SCALES, 1: SCALES[::-1]}
    with open_link({layer: scaling_experts(values) for layer, values in scales.items()}) as link:
        for pair in (batches[:2], batches[1:]):
            handles = [link.dispatch(*batch) for batch in pair]
            order = [0, 1] if first_in_first_out else [1, 0]
            outputs = {index: link.combine(handles[index]) for index in order}
            for index, (layer, *batch) in enumerate(pair):
                assert_sum(open_link, outputs[index], tuple(batch), scales[layer])


def test_slots_without_expert_are_skipped(open_link: OpenLink) -> None:
    x_TD, (ids_TK, weights_TK) = whole_rows(6, 1), choice(6, 3, 1)
    ids_TK[0], ids_TK[1:4, 1] = -1, -1
    with open_link({0: scaling_experts(SCALES)}) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
    assert (y_TD[0] == 0).all()
    assert_sum(open_link, y_TD, (x_TD, ids_TK, weights_TK), SCALES)


def test_all_rows_to_one_expert(open_link: OpenLink) -> None:
    x_TD, ids_TK, weights_TK = whole_rows(50, 1), torch.full((50, 1), 5), torch.rand(50, 1)
    with open_link({0: scaling_experts(SCALES)}) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
    assert_sum(open_link, y_TD, (x_TD, ids_TK, weights_TK), SCALES)


def test_no_rows(open_link: OpenLink) -> None:
    with open_link({0: scaling_experts(SCALES)}) as link:
        y_TD = link.combine(link.dispatch(0, torch.zeros(0, HIDDEN), *choice(0, 3, 1)))
    assert y_TD.shape == (0, HIDDEN)


def test_inputs_are_not_written_to(open_link: OpenLink) -> None:
    x_TD, (ids_TK, weights_TK) = whole_rows(6, 1), choice(6, 3, 1)
    before = [tensor.clone() for tensor in (x_TD, ids_TK, weights_TK)]
    with open_link({0: scaling_experts(SCALES)}) as link:
        y_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        y_TD += 1
    assert all(torch.equal(old, new) for old, new in zip(before, (x_TD, ids_TK, weights_TK), strict=True))


def test_result_does_not_depend_on_what_else_is_sent(open_link: OpenLink) -> None:
    x_TD, (ids_TK, weights_TK) = whole_rows(40, 1), choice(40, 4, 1)
    with open_link({0: scaling_experts(SCALES)}) as link:
        together_TD = link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        for row in (0, 19, 39):
            part = slice(row, row + 1)
            alone_1D = link.combine(link.dispatch(0, x_TD[part], ids_TK[part], weights_TK[part]))
            assert_same(open_link, alone_1D, together_TD[part])


@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
def test_a_capture_reaches_nobody_and_serves_steps_of_its_key(name: str) -> None:
    """Where there is no key a step needs the host, is not replayed, and is not captured."""
    fixed = whole_rows(5, 0), torch.full((5, SLOTS), -1), torch.ones(5, SLOTS)  # no ids, as rows that fill a graph up
    y_TD = torch.full_like(fixed[0], torch.nan)
    with IMPLEMENTATIONS[name]({0: scaling_experts(SCALES)}) as opened:
        link: Any = getattr(opened, "link", opened)  # the one inside, where steps are made of what is dispatched
        counting: list[Any] = getattr(link, "links", [link])  # of the ranks each counts what it dispatches

        def rows() -> list[int]:
            return [sum(counts) for counts in zip(*(part.expert_rows()[0] for part in counting), strict=True)]

        def exchange() -> None:
            y_TD.copy_(link.combine(link.dispatch(0, *fixed)))

        with link.capture_context(5) as key:
            assert (key is not None) == name.startswith(("local", "shared"))
            graph = exchange if key is None else record(exchange)
        assert key is None or not y_TD.any()
        assert rows() == [0] * EXPERTS
        sent = torch.zeros(EXPERTS, dtype=torch.int64)
        keys = []
        for step, known in ((1, [5]), (2, ()), (3, [5])):
            batch, finished = (whole_rows(5, step), *choice(5, SLOTS, step)), False
            for kept, new in zip(fixed, batch, strict=True):
                kept.copy_(new)
            while not finished:
                link.begin_step(step, known)
                keys.append(link.graph_key())
                (graph if keys[-1] == key else exchange)()
                sent += torch.bincount(batch[1][batch[1] >= 0], minlength=EXPERTS)
                finished = link.finish_step()
            assert_sum(IMPLEMENTATIONS[name], y_TD, batch, SCALES)
        assert {keys[0], keys[-1]} == {key}
        assert rows() == sent.tolist()
