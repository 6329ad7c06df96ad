"""The figures that `expertmesh plan` uses, where they are from, and how far its estimates were off."""

from __future__ import annotations

from dataclasses import dataclass

from services.placement.planning.layer_times import MARGIN, Link


@dataclass(frozen=True, slots=True)
class Kind:
    """Datasheet peaks of one GPU: bytes per second from memory, 16-bit flops, bytes; bytes per second to others."""

    bandwidth: float
    flops: float
    memory: float
    link: float


KINDS = {
    "a100": Kind(2.0e12, 312e12, 80e9, 300e9),
    "b200": Kind(8.0e12, 2250e12, 180e9, 900e9),
    "h100": Kind(3.35e12, 989e12, 80e9, 450e9),
    "h200": Kind(4.8e12, 989e12, 141e9, 450e9),
    "l40s": Kind(0.864e12, 362e12, 48e9, 25e9),
}
MEASURED = "h200"
USED_MEMORY = 0.9
"""Share of a GPU's memory for weights and KV cache; the rest is for activations, CUDA graphs and kernels."""
ATTENTION_S, ROW_S = 54e-6, 0.37e-6
"""What a layer takes beyond its equations, for attention's kernel, norms, sampling and the like: a constant, and a time
for each row of a GPU. Fitted to the eight decode steps of an H200 in docs/results.md ("An engine step")."""
STEP_MARGIN = 0.07
"""Greatest error of the estimates against these eight. See test_plan.py."""
REACHED_BANDWIDTH = 4.3 / 4.8
"""Share of the peak that a copy on an H200 reaches (kernels/bench/floors.py)."""
REACHED_FLOPS = 790 / 989
"""Share of the peak that a large product on an H200 reaches (kernels/bench/floors.py)."""
SHARED_ROWS = 512
"""The most tokens of a step that go through shared memory (services/attention/setup/remote_link.py). Larger steps go by
slower ways, which the equations do not have."""
PREFILL_TOKENS = 2048
"""Tokens of prompts for which a step of the printed command has room beside one token of every sequence. Decodes come
first: without that room the prompts behind a full batch would get one token a step for each place that becomes free."""
REACHED_LINK = 295 / 450
"""Share of the peak that rows through shared memory between H200s reach (see LINK_US)."""
LINK_US = 4.1
"""Latency of shared memory, one way. ADR 5: round trips of 64, 512 and 4096 KiB take 8.7, 12.2 and 36.7 us, so an empty
one takes 8.2, and each byte adds 1 / 295 GB/s each way."""
LOCKSTEP_US = 2500.0
"""Latency of lock-step among GPUs of several nodes, one way. ADR 7: a layer takes 4 to 6 ms whatever the rows, as the
host waits for sizes."""
ACROSS_US, ACROSS_GB = 20.0, 50.0
"""Latency and bandwidth between nodes: a guess at 400 Gbit/s with RDMA, not measured."""


EXPERT_TIMES = {
    "int8-channel": ((1, 0.68), (2, 0.63), (8, 0.62), (32, 0.85), (128, 1.25), (512, 1.25), (2048, 1.11)),
    "int8-g128": ((1, 0.68), (2, 0.63), (8, 0.62), (32, 0.84), (128, 1.33), (512, 1.42), (2048, 1.12)),
    "int4-channel": ((1, 0.47), (2, 0.4), (8, 0.39), (32, 0.67), (128, 0.97), (512, 1.24), (2048, 1.06)),
    "int4-g128": ((1, 0.5), (2, 0.41), (8, 0.4), (32, 0.7), (128, 1.04), (512, 1.28), (2048, 1.08)),
    "fp8-128x128": ((1, 1.22), (1.25, 0.63), (2, 0.58), (8, 0.57), (32, 0.58), (128, 0.8), (512, 0.8)),
    "mxfp4-g32": ((1, 0.73), (1.5, 0.65), (4, 0.6), (16, 0.63), (64, 1.04), (256, 1.26), (1024, 1.19)),
}
"""How experts are held -> what a call of them takes over one in bfloat16, by the rows of an expert that is hit: on an
H200, of Mixtral's, OLMoE's and Qwen3-30B's layers (kernels/bench/results.csv, suite "int4"), FP8 of Qwen3-30B's and
MXFP4 of gpt-oss-20b's (suite "formats" and the tile table). Few rows wait for weights, and gain; many are bound by
arithmetic, for which codes are first made numbers, and lose. FP8 is multiplied as it is from 8 rows on; a single row
takes a way of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What a plan was estimated with: GPU, links and load. ``across`` is the link between nodes; None: there is one."""

    gpu: str
    inside: Link
    across: Link | None
    lockstep_us: float
    skew: float

    def lines(self) -> list[str]:
        kind = KINDS[self.gpu]
        memory, flops = kind.bandwidth * REACHED_BANDWIDTH / 1e12, kind.flops * REACHED_FLOPS / 1e12
        measured = "measured" if self.gpu == MEASURED else f"an {MEASURED.upper()}'s shares of the datasheet's peaks"
        return [
            f"Accuracy: {self._margins()}",
            f"Assumptions: one {self.gpu} reaches {memory:.2f} TB/s and {flops:.0f} Tflop/s ({measured}; "
            f"kernels/bench/floors.py); {USED_MEMORY:.0%} of its memory is for weights and KV cache; {self._link()}; "
            f"colocated GPUs exchange tokens {self._together()}; {self._graphs()}; "
            f"the experts of the busiest GPU get {self.skew:g} times the mean load.",
        ]

    def _margins(self) -> str:
        untried = ["other splits"] + ([f"the {self.gpu}"] if self.gpu != MEASURED else [])
        untried += ["several nodes"] if self.across else []
        return (
            f"on one H200 within {STEP_MARGIN:.0%} of eight decode steps of Qwen3-30B-A3B and OLMoE, from which the "
            "share of attention's kernel was drawn (docs/results.md, an engine step); on 4 H200 of one node a layer "
            f"without it is within {MARGIN:.0%} of 20 measured times, shared by all, 2 + 2 or 1 + 3 "
            f"(docs/log/2026-11.md, layer times by mode). Not measured: whole steps of several GPUs, "
            f"{', '.join(untried)}."
        )

    def _graphs(self) -> str:
        if self.across:
            return "steps run as CUDA graphs in a node (across nodes they do not, and their launches are left out)"
        return "steps run as CUDA graphs"

    def _together(self) -> str:
        if self.across:
            layer = f"in lock-step over NCCL, {2 * self.lockstep_us:,.0f} us a layer (ADR 7)"
            return f"{layer}, or through shared memory (ADR 13) if they are in one node"
        return "through shared memory, too (ADR 13)"

    def _link(self) -> str:
        inside = f"tokens go to experts through shared memory in {_figures(self.inside)} (ADR 5)"
        if self.across:
            across = f"tokens cross nodes in {_figures(self.across)} (a guess: set --across-us, --across-gb)"
            return f"{across}; in a node {inside}"
        return inside


def _figures(link: Link) -> str:
    return f"{link.latency * 1e6:g} us plus their bytes at {link.bandwidth / 1e9:.0f} GB/s, one way"
