"""What holds for all public ops: no gradient is lost in silence, and kernels launch on their tensors' GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from testkit.models.attention_steps import Step
from testkit.models.moe_layers import random_layer
from torch import Tensor

from moe_kernels import (
    ArgumentError,
    MixtureOfAttention,
    SparseMLP,
    backend,
    combine,
    dequantize_experts,
    fused_moe,
    grouped_mlp,
    parallel_linear,
    plan,
    quantised_linear,
    quantize_experts,
    route,
)

LAYER = random_layer(5, hidden=16, width=8, experts=4, slots=2, biased=True)
IDS_TK = LAYER.ids_TK
X_TD = LAYER.x_TD
COUNTS_E = torch.tensor([2, 0, 2, 1], dtype=torch.int32)


@pytest.mark.parametrize("name", ["x_TD", "w_in", "w_down", "weights_TK", "bias_in", "bias_down"])
def test_fused_moe_refuses_what_wants_a_gradient(name: str) -> None:
    asked = LAYER.but(**{name: LAYER.tensors()[name].clone().requires_grad_()})
    with pytest.raises(ArgumentError, match=rf"no backward pass, and {name.split('_T')[0]} .*\(\d+, .*SparseMLP"):
        asked()
    with torch.no_grad():
        assert torch.equal(asked(), LAYER())


def test_grouped_mlp_and_route_refuse_what_wants_a_gradient() -> None:
    w_in, w_down = cast("Tensor", LAYER.w_in), cast("Tensor", LAYER.w_down)
    with pytest.raises(ArgumentError, match="grouped_mlp has no backward pass, and w_in"):
        grouped_mlp(X_TD, COUNTS_E, torch.nn.Parameter(w_in), w_down)
    with pytest.raises(ArgumentError, match=r"route has no backward pass, and logits .*detach"):
        route(torch.randn(3, 4).requires_grad_(), top_k=2)


@pytest.mark.parametrize("block_rows", [1, 8, 100, 256])
def test_plans_that_kernels_have_no_tiles_for(block_rows: int) -> None:
    made = plan(IDS_TK, 4, block_rows=block_rows)
    with pytest.raises(ArgumentError, match=f"block_rows in .*, found {block_rows}"):
        LAYER(plan=made)
    with pytest.raises(ArgumentError, match=f"block_rows in .*, found {block_rows}"):
        parallel_linear(X_TD, cast("Tensor", LAYER.w_in), made)


@pytest.mark.parametrize("name", ["keep_T", "local_E"])
def test_a_mask_with_a_plan_would_be_ignored(name: str) -> None:
    extra = {"keep_T": torch.zeros(5, dtype=torch.bool), "local_E": torch.arange(4, dtype=torch.int32)}[name]
    with pytest.raises(ArgumentError, match="plan already says which pairs take part"):
        LAYER(plan=plan(IDS_TK, 4), **{name: extra})


def test_sizes_of_zero_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"w_down .*rows and columns.*\(4, 0, 8\)"):
        fused_moe(torch.ones(5, 0), torch.ones(4, 16, 0), torch.ones(4, 0, 8), IDS_TK, torch.ones(5, 2))
    for shape in ((4, 8, 0), (4, 0, 16)):
        with pytest.raises(ArgumentError, match=r"w .*rows and columns.*\(4, "):
            parallel_linear(torch.ones(5, shape[2]), torch.ones(shape), plan(IDS_TK, 4))
    with pytest.raises(ArgumentError, match=r"local .*\(0,\)"):
        LAYER(local_E=torch.zeros(0, dtype=torch.int32))


def test_the_current_device_becomes_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        entered.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index, is_cuda in ((0, True), (1, True), (1, False)):
        tensor = SimpleNamespace(is_cuda=is_cuda, device=torch.device("cuda", index))
        with backend.device_of(cast("Tensor", tensor)):
            pass
    assert entered == [torch.device("cuda", 1)]


OPS: dict[str, Callable[[], Any]] = {
    "fused_moe": LAYER,
    "grouped_mlp": lambda: grouped_mlp(X_TD, COUNTS_E, LAYER.w_in, LAYER.w_down),
    "route": lambda: route(torch.ones(3, 4), top_k=2),
    "plan": lambda: plan(IDS_TK, 4),
    "plan, capacity": lambda: plan(IDS_TK, 4, capacity=1),
    "combine": lambda: combine(X_TD, torch.zeros(2, 2, dtype=torch.int32), None),
    "parallel_linear": lambda: parallel_linear(X_TD, cast("Tensor", LAYER.w_in), plan(IDS_TK, 4)),
    "dequantize_experts": lambda: dequantize_experts(quantize_experts(torch.ones(1, 2, 128), 4)),
    "quantised_linear": lambda: quantised_linear(
        torch.ones(2, 256), quantize_experts(torch.ones(1, 2, 256), 4), torch.ones(2)
    ),
    "paged_attention": Step([(1, 5)]),
    "SparseMLP": lambda: SparseMLP(16, 8, experts=4, top_k=2, router=True)(X_TD),
    "MixtureOfAttention": lambda: MixtureOfAttention(16, 4, heads=2, experts=4, top_k=2, router=True)(X_TD[None]),
}


@pytest.mark.parametrize("op", OPS)
def test_every_launch_is_on_the_tensors_device(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    depth, launches = 0, 0

    @contextmanager
    def device_of(_: Tensor) -> Iterator[None]:
        nonlocal depth
        depth += 1
        yield
        depth -= 1

    launch = InterpretedFunction.__getitem__

    def watched(kernel: Any, grid: Any) -> Any:
        nonlocal launches
        if depth == 0:
            raise AssertionError(f"{kernel} is launched on whatever device is current")
        launches += 1
        return launch(kernel, grid)

    monkeypatch.setattr(backend, "device_of", device_of)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", watched, raising=False)
    with backend.forced("triton"):
        OPS[op]()
    assert launches > 0
