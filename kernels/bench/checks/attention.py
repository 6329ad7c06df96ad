"""paged_attention on steps of all kinds against its reference; in a CUDA graph; and beside other sequences."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from bench.attention_case import AttentionCase, Heads, Lengths
from bench.bank import DTYPES
from bench.checks.base import Check, kernels, random, references, require, share
from moe_kernels.paged_attention.op import paged_attention
from moe_kernels.paged_decode.op import paged_decode

SHAPES: Final = (
    Heads(name="32-4-128", heads=32, kv_heads=4, head_dim=128),
    Heads(name="16-16-64", heads=16, kv_heads=16, head_dim=64),
    Heads(name="12-2-96", heads=12, kv_heads=2, head_dim=96),
    Heads(name="16-8-256", heads=16, kv_heads=8, head_dim=256),
    Heads(name="24-1-128", heads=24, kv_heads=1, head_dim=128),
)
GPT_OSS: Final = Heads(name="64-8-64", heads=64, kv_heads=8, head_dim=64)
STEPS: Final = {
    "decodes": Lengths(rows=(1,) * 40, kv_len=tuple(range(1, 4000, 100))),
    "one decode": Lengths(rows=(1,), kv_len=(20_000,)),
    "prompts": Lengths(rows=(1500, 17, 300, 64), kv_len=(1500, 17, 2345, 64)),
    "mix": Lengths(rows=(1, 1, 5, 3, 700, 1, 130), kv_len=(900, 16, 4000, 33, 700, 8000, 1155)),
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "window": {"window": 200},
    "sinks": {"sinks": True, "window": 128},
    "softcap": {"softcap": 20.0},
    "split": {"split": 512},
    "trees": {"trees": True},
    "trees, window": {"trees": True, "window": 3},
}
SPLIT: Final = 256
CPU_DIVISOR: Final = 40
"""Of lengths in the interpreter."""


def attention_checks() -> list[Check]:
    found = [
        Check(
            name=f"attention {shape.name} {dtype} {step} {option}",
            key=f"attention {shape.name} {dtype} {step == 'decodes'}",
            run=partial(check_step, shape, dtype, step, option),
        )
        for shape in SHAPES
        for dtype in ("bf16", "fp16", "fp32")
        for step in STEPS
        for option in OPTIONS
    ]
    for dtype in ("bf16", "fp32"):
        for kind, run in (("graph", check_graph), ("neighbours", check_neighbours), ("one row", check_decode)):
            found.append(
                Check(name=f"attention {kind} {dtype}", key=f"attention {kind} {dtype}", run=partial(run, dtype))
            )
    return found


def check_step(shape: Heads, dtype: str, step: str, option: str, device: str) -> float:
    """The reference takes the same numbers in float32."""
    given = dict(OPTIONS[option])
    sinks_N = random((shape.heads,), torch.float32, device, seed=3) if given.pop("sinks", False) else None
    softcap = given.pop("softcap", None)
    case = AttentionCase(shape, _sized(STEPS[step], device), dtype, device, copies=1, **given)
    with kernels(device):
        found = _run(case, softcap=softcap, sinks_N=sinks_N)
    case.q_TNH, case.k_PBJH, case.v_PBJH = case.q_TNH.float(), case.k_PBJH.float(), case.v_PBJH.float()
    with references():
        return share(found, _run(case, softcap=softcap, sinks_N=sinks_N), DTYPES[dtype])


def check_decode(dtype: str, device: str) -> float:
    """paged_decode of gpt-oss's heads, with sinks, with and without a window."""
    case = AttentionCase(GPT_OSS, _sized(STEPS["decodes"], device), dtype, device, copies=1)
    kv_len_S = torch.tensor(case.lengths.kv_len, dtype=torch.int32, device=device)
    sinks_N = random((GPT_OSS.heads,), torch.float32, device, seed=3)
    arguments = case.q_TNH, case.k_PBJH, case.v_PBJH
    worst = 0.0
    for window in (None, 128):
        with kernels(device):
            found = paged_decode(*arguments, case.tables[0], kv_len_S, window=window, sinks_N=sinks_N)
        with references():
            q_TNH, k_PBJH, v_PBJH = (part.float() for part in arguments)
            expected = paged_decode(q_TNH, k_PBJH, v_PBJH, case.tables[0], kv_len_S, window=window, sinks_N=sinks_N)
            worst = max(worst, share(found, expected, DTYPES[dtype]))
    return worst


def check_graph(dtype: str, device: str) -> float:
    """Captured once, replayed on a list with fewer sequences and then the first one: equal to plain calls."""
    case = AttentionCase(SHAPES[0], _sized(STEPS["mix"], device), dtype, device, copies=1)
    few = Lengths(rows=case.lengths.rows[:3], kv_len=case.lengths.kv_len[:3])
    with kernels(device), torch.no_grad():
        plain = _run(case)
        if device == "cpu":
            return 0.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _run(case)
        for lengths in (few, case.lengths):
            case.work.fill(case.words(lengths))
            graph.replay()
            require(torch.equal(captured, _run(case)), f"a replay with {lengths} differs from a plain call")
            require(torch.equal(captured, plain) == (lengths is case.lengths), "the list changed nothing")
    return 0.0


def check_neighbours(dtype: str, device: str) -> float:
    """Equal bits of a sequence alone and among others, with a split: decodes, rows to verify, a prompt."""
    for rows, length in ((1, 5000), (5, 3000), (700, 900)):
        mine = _sized(Lengths(rows=(rows,), kv_len=(length,)), device)
        mates = _sized(STEPS["mix"], device)
        both = Lengths(rows=mine.rows + mates.rows, kv_len=mine.kv_len + mates.kv_len)
        batch = AttentionCase(SHAPES[0], both, dtype, device, copies=1, split=SPLIT)
        alone = AttentionCase(SHAPES[0], mine, dtype, device, copies=1, split=SPLIT)
        alone.planner, alone.work = _like(batch, alone)
        alone.q_TNH, alone.k_PBJH, alone.v_PBJH = batch.q_TNH[: mine.total], batch.k_PBJH, batch.v_PBJH
        alone.tables = batch.tables
        with kernels(device):
            require(torch.equal(_run(alone), _run(batch)[: mine.total]), f"others changed {rows} rows at {length}")
    return 0.0


def _like(batch: AttentionCase, alone: AttentionCase) -> tuple[Any, Any]:
    """A planner with the tiles of ``batch``, which come from what it serves, for the rows of ``alone``."""
    from moe_kernels.paged_attention.planner import Planner
    from moe_kernels.paged_attention.work import Work

    planner = Planner(
        batch.planner.tiling, rows=alone.lengths.total, sequences=1, positions=alone.lengths.kv_len[0], split=SPLIT
    )
    words = torch.from_numpy(planner.plan(alone.lengths.rows, alone.lengths.kv_len))
    return planner, Work.empty(planner, alone.device).fill(words)


def _run(case: AttentionCase, **options: Any) -> Tensor:
    return paged_attention(case.q_TNH, case.k_PBJH, case.v_PBJH, case.tables[0], case.work, **options)


def _sized(lengths: Lengths, device: str) -> Lengths:
    if device != "cpu":
        return lengths
    rows = tuple(max(1, count // CPU_DIVISOR) for count in lengths.rows)
    kv_len = (max(count, length // CPU_DIVISOR) for count, length in zip(rows, lengths.kv_len, strict=True))
    return Lengths(rows=rows, kv_len=tuple(kv_len))
