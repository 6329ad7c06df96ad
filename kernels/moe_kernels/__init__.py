"""Ops of a Mixture-of-Experts layer: choose the experts, run them, sum what they return; and train them.

Stands alone: imports torch and nothing of the server. On CUDA tensors the ops launch Triton kernels (modules
``kernel``, imported when first needed); elsewhere their references in plain torch run; :mod:`moe_kernels.reference`
says what they mean. Every op can be held in a CUDA graph.
"""

from moe_kernels.activations.op import Activation
from moe_kernels.arguments import ArgumentError
from moe_kernels.combine.op import combine
from moe_kernels.counts.op import count_pairs
from moe_kernels.experts.op import WeightsOn, fused_moe, grouped_mlp
from moe_kernels.experts.ordered import fold_order
from moe_kernels.linear.op import quantised_linear
from moe_kernels.plan.op import plan
from moe_kernels.plan.types import FirstCome, Plan
from moe_kernels.quant.op import QuantisationError, dequantize_experts, quantisation_error, quantize_experts
from moe_kernels.quant.packing import from_codes, scales_as
from moe_kernels.quant.weight import QuantisedWeight, Weight, stack_rows
from moe_kernels.router.op import GroupScore, Order, Score, route
from moe_kernels.training.mixture_of_attention import MixtureOfAttention
from moe_kernels.training.parallel_linear import parallel_linear
from moe_kernels.training.sparse_mlp import SparseMLP, sparse_mlp

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ArgumentError",
    "FirstCome",
    "GroupScore",
    "MixtureOfAttention",
    "Order",
    "Plan",
    "QuantisationError",
    "QuantisedWeight",
    "Score",
    "SparseMLP",
    "Weight",
    "WeightsOn",
    "combine",
    "count_pairs",
    "dequantize_experts",
    "fold_order",
    "from_codes",
    "fused_moe",
    "grouped_mlp",
    "parallel_linear",
    "plan",
    "quantisation_error",
    "quantised_linear",
    "quantize_experts",
    "route",
    "scales_as",
    "sparse_mlp",
    "stack_rows",
]
