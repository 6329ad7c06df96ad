"""route and plan against their references: ids, orders and tile lists exactly, weights to float32 rounding."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any, Final

import torch

from bench.checks.base import Check, kernels, random, references, require, share
from moe_kernels.counts.op import count_pairs
from moe_kernels.plan.op import plan
from moe_kernels.plan.types import Plan
from moe_kernels.router.op import route

ROWS: Final = (0, 1, 3, 64, 513, 4096)
FAMILIES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "mixtral": (8, {"top_k": 2, "renormalise": True}),
    "olmoe": (64, {"top_k": 8}),
    "qwen3": (128, {"top_k": 8, "renormalise": True}),
    "gpt_oss": (128, {"top_k": 4, "order": "choose_first"}),
    "deepseek_v2": (160, {"top_k": 6, "groups": 8, "top_groups": 3, "scale": 16.0}),
    "deepseek_v3": (
        256,
        {"top_k": 8, "score": "sigmoid", "groups": 8, "top_groups": 4, "group_score": "top2_sum"}
        | {"renormalise": True, "scale": 2.5, "correction_bias_E": True},
    ),
    "switch": (512, {"top_k": 1}),
    "odd": (60, {"top_k": 3, "renormalise": True}),
}
PLANS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "tiles of 16": {"block_rows": 16},
    "capacity": {"capacity": 7},
    "capacity by slot": {"capacity": 7, "first_come": "slot"},
    "keep": {"keep_T": True},
    "local": {"local_E": True},
}


def routing_checks() -> list[Check]:
    found = [
        Check(
            name=f"route {family} rows {rows}{' ties' * ties}",
            key=f"route {family}",
            run=partial(check_route, family, rows, ties),
        )
        for family in FAMILIES
        for rows in ROWS
        for ties in (False, True)
    ]
    counts = [
        Check(name=f"count experts {experts} rows {rows}", key="count", run=partial(check_count, experts, rows))
        for experts in (8, 60, 128, 256)
        for rows in ROWS
    ]
    return (
        found
        + counts
        + [
            Check(
                name=f"plan {kind} rows {rows} experts {experts}",
                key=f"plan {kind} {experts}",
                run=partial(check_plan, kind, rows, experts),
            )
            for kind in PLANS
            for experts in (8, 128)
            for rows in ROWS
        ]
    )


def check_route(family: str, rows: int, ties: bool, device: str) -> float:
    """Ties: logits of four different values, so that most choices are decided by the lowest id."""
    experts, flags = FAMILIES[family]
    logits_TE = random((rows, experts), torch.float32, device, seed=rows)
    if ties:
        logits_TE = logits_TE.clamp(-1, 1).round()
    flags = dict(flags)
    if "correction_bias_E" in flags:
        # Dyadic, as are the ties: sums are exact.
        flags["correction_bias_E"] = (random((experts,), torch.float32, device, seed=9) * 4).round() / 4
    with kernels(device):
        ids_TK, weights_TK = route(logits_TE, **flags)
    with references():
        expected_TK, wanted_TK = route(logits_TE, **flags)
    different = int((ids_TK != expected_TK).any(1).sum())
    # Scores a rounding apart may trade places; equal logits may not.
    require(different <= (0 if ties else rows // 1000), f"{different} of {rows} rows chose other experts")
    same = (ids_TK == expected_TK).all(1)
    return share(weights_TK[same], wanted_TK[same], torch.float32)


def check_count(experts: int, rows: int, device: str) -> float:
    generator = torch.Generator().manual_seed(rows)
    ids_TK = torch.randint(-2, experts + 3, (rows, 8), generator=generator).to(device)
    found, wanted = (torch.arange(experts, device=device) for _ in range(2))
    with kernels(device):
        count_pairs(found, ids_TK)
    with references():
        count_pairs(wanted, ids_TK)
    require(torch.equal(found, wanted), "counts differ")
    return 0.0


def check_plan(kind: str, rows: int, experts: int, device: str) -> float:
    slots = 3
    generator = torch.Generator().manual_seed(rows)
    ids_TK = torch.randint(-2, experts + 3, (rows, slots), generator=generator, dtype=torch.int32).to(device)
    options = dict(PLANS[kind])
    if "keep_T" in options:
        options["keep_T"] = torch.arange(rows, device=device) % 4 != 2
    if "local_E" in options:
        local = torch.randperm(experts, generator=generator).to(torch.int32)
        options["local_E"] = torch.where(local < experts // 2, local, -1).to(device)
        experts //= 2
    with kernels(device):
        found = plan(ids_TK, experts, **options)
    with references():
        expected = plan(ids_TK, experts, **options)
    _equal(found, expected)
    return 0.0


def _equal(found: Plan, expected: Plan) -> None:
    for field in fields(Plan):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(a, torch.Tensor):
            require(torch.equal(a, b), f"{field.name} differs")
        else:
            require(a == b, f"{field.name}: {a} instead of {b}")
