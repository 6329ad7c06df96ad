"""One MoE layer of known models, from one token to a long prefill, beside vLLM and torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench.measuring import Settings, measure_shape
from bench.results import Row
from bench.shapes import ROWS, find

LAYERS: Final = ("mixtral", "qwen3-30b", "olmoe", "glm-4.5-air")
ROUTE_ROWS: Final = (1, 8, 32, 128, 512)


def figures(settings: Settings) -> Iterator[Row]:
    """16-bit layers with all peers: the table that docs/kernels.md shows first."""
    yield from _layers(LAYERS, ["bf16"], ["ours", "vllm", "grouped_mm", "transformers"], settings)


def int4(settings: Settings) -> Iterator[Row]:
    """Integer weights beside Marlin and beside our own bf16; every row's floor is its own dtype's."""
    dtypes = ["bf16", "int8", "int8_channel", "int4", "int4_channel"]
    yield from _layers(LAYERS[:3], dtypes, ["ours", "vllm_marlin"], settings)


FORMATS: Final = (
    ("qwen3-30b", "bf16", ("ours",)),
    ("qwen3-30b", "int4", ("ours", "vllm_marlin")),
    ("qwen3-30b", "fp8", ("ours", "ours_weight_only", "vllm_fp8")),
    ("gpt-oss-20b", "bf16", ("ours",)),
    ("gpt-oss-20b", "mxfp4", ("ours", "vllm_mxfp4", "vllm_marlin_mxfp4")),
    ("deepseek-v3", "fp8", ("ours", "ours_weight_only", "vllm_fp8")),
)
"""Layers in the formats that their authors publish: shape, dtype and who is measured."""


def formats(settings: Settings) -> Iterator[Row]:
    """Published formats beside vLLM's kernels for them."""
    for name, dtype, providers in FORMATS:
        yield from _layers([name], [dtype], list(providers), settings)


def route_plan(settings: Settings) -> Iterator[Row]:
    """The router and the sort behind it, 128 experts."""
    shape = find("qwen3-30b").scaled(settings.scale)
    ops, providers = ["route", "plan", "route_plan"], ["ours", "vllm", "grouped_mm"]
    yield from measure_shape(ops, shape, _rows(ROUTE_ROWS, settings), ["bf16"], providers, settings)


def _layers(names: Sequence[str], dtypes: list[str], providers: list[str], settings: Settings) -> Iterator[Row]:
    for name in names:
        shape = find(name).scaled(settings.scale)
        yield from measure_shape(["fused_moe"], shape, _rows(ROWS, settings), dtypes, providers, settings)


def _rows(rows: Sequence[int], settings: Settings) -> list[int]:
    """Up to ``settings.tokens``."""
    return [count for count in rows if settings.tokens is None or count <= settings.tokens]
