"""What ``bench.verify`` checks: every public op on a GPU against its reference, and against what its docstring
promises.
"""

from __future__ import annotations

from bench.checks.attention import attention_checks
from bench.checks.base import Check
from bench.checks.dense import dense_checks
from bench.checks.foreign import foreign_checks
from bench.checks.graphs import graph_checks
from bench.checks.latents import latent_checks
from bench.checks.layers import layer_checks
from bench.checks.options import option_checks
from bench.checks.routing import routing_checks
from bench.checks.training import training_checks


def all_checks(*, scale: int = 1) -> list[Check]:
    """Those that compile the most kernels first: they decide how long the pool runs. ``scale`` divides widths."""
    return [
        *layer_checks(scale),
        *training_checks(),
        *foreign_checks(),
        *option_checks(),
        *graph_checks(),
        *routing_checks(),
        *attention_checks(),
        *latent_checks(),
        *dense_checks(),
    ]
