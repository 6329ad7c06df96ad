"""Activations and their derivatives over grouped rows, one program per row; bound by memory."""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.activations.kernel import ALPHA, LIMIT, TWO_SQRT_2_OVER_PI, activate, normal
from moe_kernels.activations.op import gated

# In products the tensor comes first: with the constant first the interpreter makes a constexpr of them.
CUBIC = tl.constexpr(0.044715)


@triton.jit
def activation_gradient(gate, up, dh, ACT: tl.constexpr):
    """Gradients of ``activate(gate, up, ACT)`` times dh with respect to gate and up; float32 tiles.

    Example: ACT "silu", gate 0, dh 1: 0.5. ACT "swiglu", gate 0, up 6, dh 1: 3 and 0.
    """
    zero = gate * 0.0
    if ACT == "swiglu":
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        return dh * up * (sigmoid + silu * (1.0 - sigmoid)), dh * silu
    elif ACT == "swiglu_oai":
        g = tl.where(gate > LIMIT, LIMIT, gate)
        u = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        sigmoid = tl.sigmoid(g * ALPHA)
        dgate = dh * (u + 1.0) * (sigmoid + g * ALPHA * sigmoid * (1.0 - sigmoid))
        # A clamp passes the gradient where it changes nothing, its bounds included.
        return tl.where(gate <= LIMIT, dgate, 0.0), tl.where((up >= -LIMIT) & (up <= LIMIT), dh * g * sigmoid, 0.0)
    elif ACT == "gelu":
        cdf, density = normal(gate)
        return dh * (cdf + gate * density), zero
    elif ACT == "gelu_tanh":
        # gate x sigmoid(2z), z = sqrt(2 / pi) (gate + c gate^3).
        sigmoid = tl.sigmoid((gate + gate * gate * gate * CUBIC) * TWO_SQRT_2_OVER_PI)
        slope = (1.0 + gate * gate * (3.0 * CUBIC)) * TWO_SQRT_2_OVER_PI
        return dh * (sigmoid + gate * sigmoid * (1.0 - sigmoid) * slope), zero
    elif ACT == "relu":
        return tl.where(gate <= 0.0, 0.0, dh), zero
    elif ACT == "silu":
        sigmoid = tl.sigmoid(gate)
        return dh * (sigmoid + gate * sigmoid * (1.0 - sigmoid)), zero
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        return dh, zero


@triton.jit
def _pre(row, columns, pre, width, F, GATED: tl.constexpr):
    at = pre + row * width + columns
    gate = tl.load(at, mask=columns < F, other=0.0).to(tl.float32)
    if GATED:
        return gate, tl.load(at + F, mask=columns < F, other=0.0).to(tl.float32)
    else:
        return gate, gate


@triton.jit
def activation_forward_kernel(
    pre, out, ends_E, E, F, width, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """out[r] = ACT(pre[r]) for owned grouped rows; see :func:`moe_kernels.activations.kernel.activate`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(ends_E + E - 1):
        gate, up = _pre(row, columns, pre, width, F, GATED)
        h = activate(gate, up, ACT)
        tl.store(out + row * F + columns, h.to(out.dtype.element_ty), mask=columns < F)


@triton.jit
def activation_backward_kernel(
    du, pre, gates_S, dpre, weighted, dgates_S, order_S, ends_E, E, F, width, ACT: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):
    """For each owned grouped row r of pair p: dpre[r] = gate[p] du[r] ACT'(pre[r]), weighted[r] = gate[p] ACT(pre[r]),
    dgates[p] = ACT(pre[r]) . du[r]. du and dpre may be the same memory.

    Example: ACT "relu", pre ``[-1, 2]``, du ``[5, 3]``, gate 10: dpre ``[0, 30]``, weighted ``[0, 20]``, dgate 6.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends_E + E - 1):
        pair = tl.load(order_S + row)
        weight = tl.load(gates_S + pair).to(tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, F, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            gate, up = _pre(row, columns, pre, width, F, GATED)
            d = tl.load(du + row * F + columns, mask=columns < F, other=0.0).to(tl.float32)
            h = activate(gate, up, ACT)
            dgate, dup = activation_gradient(gate, up, weight * d, ACT)
            total += h * d
            tl.store(weighted + row * F + columns, (weight * h).to(weighted.dtype.element_ty), mask=columns < F)
            tl.store(dpre + row * width + columns, dgate.to(dpre.dtype.element_ty), mask=columns < F)
            if GATED:
                tl.store(dpre + row * width + F + columns, dup.to(dpre.dtype.element_ty), mask=columns < F)
        tl.store(dgates_S + pair, tl.sum(total, 0).to(dgates_S.dtype.element_ty))


def launch_forward(pre_S: Tensor, out_SF: Tensor, ends_E: Tensor, activation: str, *, block: int = 2048) -> None:
    rows, columns = out_SF.shape
    block = min(block, triton.next_power_of_2(columns))
    activation_forward_kernel[(rows, triton.cdiv(columns, block))](
        pre_S, out_SF, ends_E, ends_E.shape[0], columns, pre_S.shape[1],
        ACT=activation, GATED=gated(activation), BLOCK=block,
    )


def launch_backward(
    du_SF: Tensor, pre_S: Tensor, gates_TK: Tensor, dpre_S: Tensor, weighted_SF: Tensor, dgates_TK: Tensor,
    order_S: Tensor, ends_E: Tensor, activation: str, *, block: int = 1024,
) -> None:
    assert gates_TK.is_contiguous()
    rows, columns = du_SF.shape
    activation_backward_kernel[(rows,)](
        du_SF, pre_S, gates_TK, dpre_S, weighted_SF, dgates_TK, order_S, ends_E, ends_E.shape[0], columns,
        pre_S.shape[1], ACT=activation, GATED=gated(activation),
        BLOCK=min(block, triton.next_power_of_2(columns)),
    )
