"""Ops of a Mixture-of-Experts layer: choose the experts, run them, sum what they return.

Stands alone: imports torch and nothing of the server. :mod:`moe_kernels.reference` says what each op means.
"""

from moe_kernels.arguments import ArgumentError
from moe_kernels.experts import fused_moe
from moe_kernels.router import GroupScore, Order, Score, route

__all__ = ["ArgumentError", "GroupScore", "Order", "Score", "fused_moe", "route"]
