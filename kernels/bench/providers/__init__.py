"""Implementations that are measured side by side: each turns a case into a call, or says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench.providers.base import Prepare, Unsupported
from bench.providers.ours import prepare_ours, prepare_reference, prepare_weight_only
from bench.providers.torch_chains import prepare_grouped_mm, prepare_transformers
from bench.providers.vllm import prepare_fp8, prepare_marlin, prepare_vllm
from bench.providers.vllm_mxfp4 import prepare_marlin_mxfp4, prepare_mxfp4

PROVIDERS: Final[Mapping[str, Prepare]] = {
    "ours": prepare_ours,
    "ours_weight_only": prepare_weight_only,
    "vllm": prepare_vllm,
    "vllm_marlin": prepare_marlin,
    "vllm_fp8": prepare_fp8,
    "vllm_mxfp4": prepare_mxfp4,
    "vllm_marlin_mxfp4": prepare_marlin_mxfp4,
    "grouped_mm": prepare_grouped_mm,
    "transformers": prepare_transformers,
    "torch": prepare_reference,
}
"""In the order in which they run: those that may leave a failed capture behind come last."""

ROUNDED: Final = ("ours", "vllm_fp8")
"""Those that may round rows to FP8 where weights are FP8."""

__all__ = ["PROVIDERS", "ROUNDED", "Prepare", "Unsupported"]
