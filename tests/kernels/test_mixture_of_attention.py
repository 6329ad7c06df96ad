"""MixtureOfAttention against one query row, one head at a time."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from testkit.models.pair_layouts import random_ids
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError
from moe_kernels.rotary.op import rotate_heads
from moe_kernels.training.mixture_of_attention import MixtureOfAttention

both_paths = pytest.mark.usefixtures("path")
HIDDEN, SIZE, EXPERTS, SLOTS = 8, 4, 5, 2


def module_of(dtype: torch.dtype = torch.float64, **options: object) -> MixtureOfAttention:
    torch.manual_seed(0)
    arguments: dict[str, object] = {"heads": 4, "key_heads": 2, "experts": EXPERTS, "top_k": SLOTS, **options}
    module = MixtureOfAttention(HIDDEN, SIZE, dtype=dtype, **arguments)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 2
            )
    return module


def inputs(batch: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids, gates."""
    x_BLD = torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gates_TK = torch.rand(batch * length, SLOTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = torch.promote_types(dtype, torch.float32)
    return x_BLD.to(dtype), random_ids(batch * length, SLOTS, EXPERTS), gates_TK.to(exact)


def turned(row_C: Tensor, position: float, theta: float | None) -> Tensor:
    """Rotary position, as complex numbers."""
    if theta is None:
        return row_C
    half = row_C.shape[0] // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    values = torch.complex(row_C[:half], row_C[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([values.real, values.imag])


def one_sequence(
    module: MixtureOfAttention, x_LD: Tensor, ids_LK: Tensor, gates_LK: Tensor, positions_L: list[float]
) -> Tensor:
    """Query rows one by one, in float64."""
    w_query, w_out = module.w_query.double(), module.w_out.double()
    shape = (len(x_LD), module.key_heads, SIZE)
    key = (x_LD @ module.key.weight.double().t()).view(shape)
    value = (x_LD @ module.value.weight.double().t()).view(shape)
    rows = []
    for t, ids in enumerate(ids_LK.tolist()):
        y_D = torch.zeros(HIDDEN, dtype=torch.float64)
        seen = t + 1 if module.causal else len(x_LD)
        for slot, expert in enumerate(ids):
            query = (w_query[expert] @ x_LD[t]).view(module.heads, SIZE)
            heads = []
            for head in range(module.heads):
                group = head // (module.heads // module.key_heads)
                q = turned(query[head], positions_L[t], module.rope_theta)
                keys = [turned(key[s, group], positions_L[s], module.rope_theta) for s in range(seen)]
                scores = torch.softmax(torch.stack([q @ k for k in keys]) / math.sqrt(SIZE), 0)
                heads.append(scores @ value[:seen, group])
            y_D = y_D + gates_LK[t, slot] * (w_out[expert] @ torch.cat(heads))
        rows.append(y_D)
    return torch.stack(rows)


def expected(
    module: MixtureOfAttention, x: Tensor, ids: Tensor, gates: Tensor, positions: Tensor | None = None
) -> Tensor:
    batch, length, _ = x.shape
    sequences = []
    for at in range(batch):
        part = slice(at * length, (at + 1) * length)
        places = list(range(length)) if positions is None else positions[at].tolist()
        sequences.append(one_sequence(module, x[at].double(), ids[part], gates[part].double(), places))
    return torch.stack(sequences)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("causal", "theta"), [(True, 10_000.0), (False, 100.0), (True, None)])
def test_equals_the_loop(key_heads: int, causal: bool, theta: float | None) -> None:
    module = module_of(key_heads=key_heads, causal=causal, rope_theta=theta)
    x, ids, gates = inputs(2, 6)
    assert_close(module(x, ids_TK=ids, gates_TK=gates), expected(module, x, ids, gates).detach())


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_equal_the_loop(dtype: torch.dtype) -> None:
    module = module_of(dtype)
    x, ids, gates = inputs(2, 5, dtype)
    assert_close(module(x, ids_TK=ids, gates_TK=gates), expected(module, x, ids, gates).detach(), 16)


@both_paths
def test_positions() -> None:
    module = module_of(torch.float32)
    x, ids, gates = inputs(2, 4, torch.float32)
    positions = torch.tensor([[3, 4, 5, 6], [0, 10, 11, 40]])
    y = module(x, ids_TK=ids, gates_TK=gates, positions_BL=positions)
    assert_close(y, expected(module, x, ids, gates, positions).detach(), 32)
    # Only distances count.
    assert_close(module(x, ids_TK=ids, gates_TK=gates, positions_BL=positions + 7), y.detach(), 64)


def test_gradients_by_finite_differences() -> None:
    module = module_of(router=True)
    x, _, _ = inputs(1, 3)
    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        return result

    parameters = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    assert torch.autograd.gradcheck(call, (x.requires_grad_(), *parameters), fast_mode=True)


@both_paths
def test_gradients_of_the_kernels() -> None:
    module = module_of(torch.float32)
    x, ids, gates = inputs(2, 4, torch.float32)
    wide = module_of()
    wide.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    leaves, wide_leaves = ([x.requires_grad_(), gates.requires_grad_(), *module.parameters()]), []
    wide_x, wide_gates = (leaf.detach().double().requires_grad_() for leaf in (x, gates))
    wide_leaves = [wide_x, wide_gates, *wide.parameters()]
    want = expected(wide, wide_x, ids, wide_gates)
    y = module(x, ids_TK=ids, gates_TK=gates)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    wants = torch.autograd.grad(want, wide_leaves, dy.double())
    for actual, theirs in zip(torch.autograd.grad(y, leaves, dy), wants, strict=True):
        assert_close(actual, theirs, 64)


@both_paths
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 2), (2, 3, 2, 3, 2, 6), (3, 5, 40, 1, 1, 10)])
def test_rotate_heads(shape: tuple[int, ...]) -> None:
    """Each head as complex numbers, forward and backward, from rows that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(*shape[:-1], shape[-1] + 2, generator=generator).requires_grad_()
    x_BLKGRC, half = wide[..., :-2], shape[-1] // 2
    angles_BLC = torch.randn(shape[0], shape[1], half, generator=generator)
    values = torch.complex(*x_BLKGRC.double().split(half, -1))
    values = values * torch.polar(torch.ones_like(angles_BLC), angles_BLC).to(values.dtype)[:, :, None, None, None]
    want = torch.cat([values.real, values.imag], -1).permute(0, 3, 2, 4, 1, 5)
    actual = rotate_heads(x_BLKGRC, angles_BLC)
    assert actual.is_contiguous()
    assert_close(actual, want.detach())
    dy = torch.randn(want.shape, generator=generator)
    (dx,), (want_dx,) = torch.autograd.grad(actual, wide, dy), torch.autograd.grad(want, wide, dy.double())
    assert_close(dx, want_dx)


def test_wrong_arguments_are_named() -> None:
    for words, options in {
        "4 heads do not divide into 3 key heads": {"key_heads": 3},
        "key_heads must be at least 1, found 0": {"key_heads": 0},
    }.items():
        with pytest.raises(ArgumentError, match=words):
            module_of(**options)
    with pytest.raises(ArgumentError, match="head_size must be even, found 5"):
        MixtureOfAttention(8, 5, heads=4, experts=3, top_k=2)
    x, ids, gates = inputs(1, 3)
    for words, call in {
        r"x must be \[B, L, D\]": lambda: module_of()(x[0], ids_TK=ids, gates_TK=gates),
        "pass either router logits or ids": lambda: module_of()(x),
        "both|either": lambda: module_of()(x, torch.zeros(3, EXPERTS), ids_TK=ids, gates_TK=gates),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            call()


@both_paths
def test_what_does_not_fit_a_call_is_named() -> None:
    module = module_of(torch.float32)
    x, ids, gates = inputs(2, 3, torch.float32)
    chosen = {"ids_TK": ids, "gates_TK": gates}

    def at(*shape: int, device: str = "cpu") -> Tensor:
        return module(x, **chosen, positions_BL=torch.ones(shape, device=device))

    for words, call in {
        r"x must be \[..., D=8\].*found .*\(2, 3, 7\)": lambda: module(x[..., :7], **chosen),
        r"x must be .*found .*float16 of shape \(2, 3, 8\)": lambda: module(x.half(), **chosen),
        r"positions must be \[2 or 1, 3\], found .*\(2, 4\)": lambda: module(
            x, **chosen, positions_BL=torch.ones(2, 4)
        ),
        r"positions must be .*found .*\(3, 3\)": lambda: at(3, 3),
        r"positions must be .*found .*\(3,\)": lambda: at(3),
        "positions is on meta": lambda: at(2, 3, device="meta"),
        r"logits must be \[T=6, E=5\], found .*\(5, 5\)": lambda: module(x, torch.ones(5, 5)),
        r"ids must be \[T=6, K\], found .*\(5, 2\)": lambda: module(x, ids_TK=ids[:5], gates_TK=gates[:5]),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            call()
    with pytest.raises(ArgumentError, match=r"top_k must be in 1\.\.5"):
        module_of(top_k=6)


@both_paths
def test_as_many_slots_as_the_ids_have() -> None:
    x, ids, gates = inputs(2, 3, torch.float32)
    module, wider = module_of(torch.float32), module_of(torch.float32, top_k=3)
    ids, gates = torch.cat([ids, ids[:, :1]], 1), torch.cat([gates, gates[:, :1]], 1)
    assert torch.equal(module(x, ids_TK=ids, gates_TK=gates), wider(x, ids_TK=ids, gates_TK=gates))


@both_paths
@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_no_tokens(batch: int, length: int) -> None:
    x, ids, gates = inputs(batch, length, torch.float32)
    module = module_of(torch.float32)
    y = module(x, ids_TK=ids, gates_TK=gates)
    assert y.shape == x.shape
    y.sum().backward()
    assert module.w_out.grad is not None
    assert not module.w_out.grad.any()


@both_paths
def test_under_autocast_it_runs_in_autocasts_dtype() -> None:
    module = module_of(torch.float32, router=True)
    x, _, _ = inputs(2, 3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    assert_close(y.detach(), module(x).detach(), 16)


def test_copies_and_saves() -> None:
    module, other = (
        module_of(torch.float32, router=True),
        MixtureOfAttention(HIDDEN, SIZE, heads=4, key_heads=2, experts=EXPERTS, top_k=SLOTS, router=True),
    )
    x, _, _ = inputs(2, 3, torch.float32)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert f"experts={EXPERTS}, top_k={SLOTS}" in repr(module)
