"""Named sets of measurements. Each takes the run's settings and yields rows as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from bench.measuring import Settings
from bench.results import Row
from bench.suites.attention import attention
from bench.suites.deepspeed import gating
from bench.suites.elephants import gemm, table1
from bench.suites.latents import latents
from bench.suites.layers import figures, formats, int4, route_plan
from bench.suites.momha import momha
from bench.suites.scattermoe import granularity, sparsity, unit
from bench.suites.training import whole_model

SUITES: Final[Mapping[str, Callable[[Settings], Iterator[Row]]]] = {
    "figures": figures,
    "int4": int4,
    "formats": formats,
    "route_plan": route_plan,
    "scattermoe-unit": unit,
    "scattermoe-train": whole_model,
    "scattermoe-granularity": granularity,
    "scattermoe-sparsity": sparsity,
    "scattermoe-momha": momha,
    "elephants-table1": table1,
    "elephants-gemm": gemm,
    "deepspeed-gating": gating,
    "attention": attention,
    "latents": latents,
}
