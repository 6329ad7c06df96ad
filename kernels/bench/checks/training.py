"""parallel_linear, sparse_mlp and MixtureOfAttention: outputs and gradients against the references in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from bench import draws
from bench.bank import DTYPES
from bench.checks.base import Check, kernels, random, references, share, unaligned
from moe_kernels.plan.op import plan
from moe_kernels.training.mixture_of_attention import MixtureOfAttention
from moe_kernels.training.parallel_linear import parallel_linear
from moe_kernels.training.sparse_mlp import sparse_mlp

ROWS: Final = (5, 130, 1000)
EXPERTS: Final = 12
SLOTS: Final = 3
IN: Final = 256
OUT: Final = 384
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "token to pair": {},
    "token to grouped": {"grouped_out": True},
    "pair to pair": {"fan_out": 1},
    "grouped to grouped": {"grouped_in": True, "grouped_out": True},
    "grouped to token": {"grouped_in": True, "gates": True},
    "pair to token": {"fan_out": 1, "gates": True},
}
Inputs = dict[str, Tensor]


def training_checks() -> list[Check]:
    linear = [
        Check(
            name=f"parallel_linear {layout} {dtype} rows {rows}",
            key=f"parallel_linear {layout} {dtype}",
            run=partial(check_linear, layout, dtype, rows),
        )
        for layout in LAYOUTS
        for dtype in ("bf16", "fp16", "fp32")
        for rows in ROWS
    ]
    mlp = [
        Check(
            name=f"sparse_mlp {activation} {dtype} rows {rows}",
            key=f"sparse_mlp {activation} {dtype}",
            run=partial(check_mlp, activation, dtype, rows),
        )
        for activation in ("swiglu", "gelu")
        for dtype in ("bf16", "fp16", "fp32")
        for rows in ROWS
    ]
    attention = [
        Check(name=f"mixture_of_attention {dtype}", key=f"momha {dtype}", run=partial(check_attention, dtype))
        for dtype in ("bf16", "fp16")
    ]
    shifted = [
        Check(name=f"{op} unaligned", key=f"{op} unaligned", run=partial(check_unaligned, op))
        for op in ("parallel_linear", "sparse_mlp")
    ]
    return [*linear, *mlp, *attention, *shifted]


def check_linear(layout: str, dtype: str, rows: int, device: str) -> float:
    """A quarter of the pairs has no expert here."""
    draw = draws.uniform(rows, EXPERTS, SLOTS, device=device)
    order = plan(torch.where(draw.ids_TK % 4 == 3, -1, draw.ids_TK), EXPERTS)
    options = dict(LAYOUTS[layout])
    given = options.pop("gates", False)
    count = rows if not options.keys() & {"fan_out", "grouped_in"} else rows * SLOTS
    inputs = _random(dtype, device, {"x": (count, IN), "w": (EXPERTS, OUT, IN), "bias": (EXPERTS, OUT)})
    if given:
        inputs["gates"] = draw.weights_TK.clone()

    def run(inputs: Inputs) -> Tensor:
        gates = inputs.get("gates")
        return parallel_linear(inputs["x"], inputs["w"], order, gates=gates, bias_EO=inputs["bias"], **options)

    return _compare(run, inputs, DTYPES[dtype], device)


def check_unaligned(op: str, device: str) -> float:
    """All inputs start one element into an allocation: the same result as where they do not."""
    draw = draws.uniform(130, EXPERTS, SLOTS, device=device)
    order = plan(draw.ids_TK, EXPERTS)
    sizes = {"x": (130, IN), "w_in": (EXPERTS, OUT, IN), "w_out": (EXPERTS, IN, OUT)}
    inputs = _random("bf16", device, sizes)

    def run(inputs: Inputs) -> Tensor:
        if op == "parallel_linear":
            return parallel_linear(inputs["x"], inputs["w_in"], order)
        return sparse_mlp(inputs["x"], inputs["w_in"], inputs["w_out"], order, draw.weights_TK)

    with kernels(device), torch.no_grad():
        first = run(inputs)
        second = run({name: unaligned(tensor) for name, tensor in inputs.items()})
    return share(second, first.float(), first.dtype)


def check_mlp(activation: str, dtype: str, rows: int, device: str) -> float:
    draw = draws.uniform(rows, EXPERTS, SLOTS, device=device)
    order = plan(draw.ids_TK, EXPERTS)
    inner = OUT * 2 if activation == "swiglu" else OUT
    sizes = {"x": (rows, IN), "w_in": (EXPERTS, inner, IN), "w_out": (EXPERTS, IN, OUT), "bias_in": (EXPERTS, inner)}
    inputs = _random(dtype, device, sizes)
    inputs["gates"] = draw.weights_TK.clone()

    def run(inputs: Inputs) -> Tensor:
        return sparse_mlp(
            inputs["x"], inputs["w_in"], inputs["w_out"], order, inputs["gates"], bias_in=inputs["bias_in"],
            activation=activation,  # type: ignore[arg-type]  # a name of moe_kernels.activations.op
        )  # fmt: skip

    return _compare(run, inputs, DTYPES[dtype], device)


def check_attention(dtype: str, device: str) -> float:
    torch.manual_seed(0)
    module = MixtureOfAttention(256, 64, heads=2, experts=8, top_k=2, device=device, dtype=torch.float32)
    draw = draws.uniform(2 * 40, 8, 2, device=device)
    inputs = _random(dtype, device, {"x": (2, 40, 256)})
    for name, parameter in module.named_parameters():
        inputs[name] = parameter.detach().to(DTYPES[dtype])

    def run(inputs: Inputs) -> Tensor:
        parameters = {name: tensor for name, tensor in inputs.items() if name != "x"}
        y: Tensor = torch.func.functional_call(
            module, parameters, (inputs["x"],), {"ids_TK": draw.ids_TK, "gates_TK": draw.weights_TK}
        )
        return y

    # Softmax and its gradient round once more in the activations' dtype.
    return _compare(run, inputs, DTYPES[dtype], device) / 2


def _random(dtype: str, device: str, sizes: dict[str, tuple[int, ...]]) -> Inputs:
    return {
        name: (random(size, torch.float32, device, seed=at) / size[-1] ** (0.5 if len(size) == 3 else 0)).to(
            DTYPES[dtype]
        )
        for at, (name, size) in enumerate(sizes.items())
    }


def _compare(run: Callable[[Inputs], Tensor], inputs: Inputs, dtype: torch.dtype, device: str) -> float:
    """The worst of the output and all gradients."""
    with kernels(device):
        found = _gradients(run, inputs)
    with references():
        expected = _gradients(run, {name: tensor.float() for name, tensor in inputs.items()})
    return max(share(found[name], expected[name], dtype) for name in expected)


def _gradients(run: Callable[[Inputs], Tensor], inputs: Inputs) -> Inputs:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    y = run(leaves)
    dy = random(tuple(y.shape), torch.float32, y.device.type, seed=11).to(y.dtype)
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **{f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}}
