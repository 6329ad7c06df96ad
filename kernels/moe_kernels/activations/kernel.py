"""The activations of :mod:`moe_kernels.activations.op` inside kernels, on float32 tiles."""

import triton
import triton.language as tl

ALPHA = tl.constexpr(1.702)
LIMIT = tl.constexpr(7.0)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
SQRT_HALF = tl.constexpr(0.7071067811865476)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def normal(x):
    """Distribution function and density of the standard normal, float32, absolute error below 2e-7.

    Abramowitz and Stegun 7.1.26: erfc(z) = exp(-z^2) x a polynomial in 1 / (1 + 0.3275911 z). One exponential serves
    both; ``tl.erf`` takes three times the instructions, more than the memory that a kernel waits for.

    Example: x = 1: 0.8413447 and 0.2419707.
    """
    z = tl.abs(x) * SQRT_HALF
    exponential = tl.exp(z * z * -1.0)
    t = 1.0 / (z * 0.3275911 + 1.0)
    polynomial = t * (t * (t * (t * (t * 1.061405429 - 1.453152027) + 1.421413741) - 0.284496736) + 0.254829592)
    tail = 0.5 * polynomial * exponential
    # NaN compares false and passes through.
    return tl.where(x < 0.0, tail, 1.0 - tail), exponential * INV_SQRT_2PI


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """Elementwise on float32 tiles of equal shape; ``up`` is ignored unless ACT is gated.

    Example: ACT "swiglu", gate 2, up 6: 2 x sigmoid(2) x 6 = 10.5696. ACT "gelu", gate 1: 0.8413.
    """
    if ACT == "swiglu":
        return gate * tl.sigmoid(gate) * up
    elif ACT == "swiglu_oai":
        # Written with where: NaN compares false and passes through.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return (up + 1.0) * gate * tl.sigmoid(gate * ALPHA)
    elif ACT == "gelu":
        return gate * normal(gate)[0]
    elif ACT == "gelu_tanh":
        # tanh(z) = 2 sigmoid(2z) - 1, so 0.5 (1 + tanh(z)) = sigmoid(2z).
        return gate * tl.sigmoid((gate + 0.044715 * gate * gate * gate) * TWO_SQRT_2_OVER_PI)
    elif ACT == "relu":
        # Not tl.maximum(gate, 0): NaN must pass through.
        return tl.where(gate < 0.0, 0.0, gate)
    elif ACT == "silu":
        return gate * tl.sigmoid(gate)
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        return gate
