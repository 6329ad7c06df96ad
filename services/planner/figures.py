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
    "h100": Kind(3.35e12, 989e12, 80e9, 450e9),
    "h200": Kind(4.8e12, 989e12, 141e9, 450e9),
    "l40s": Kind(0.864e12, 362e12, 48e9, 25e9),
}
MEASURED = "h200"
REACHED_BANDWIDTH = 4.3 / 4.8
"""Share of the peak that a copy on an H200 reaches (kernels/bench/floors.py)."""
REACHED_FLOPS = 790 / 989
"""Share of the peak that a large product on an H200 reaches (kernels/bench/floors.py)."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What a plan was estimated with: GPU, links and load. ``across`` is the link between nodes; None: there is one."""

    gpu: str
    inside: Link
    across: Link | None
    lockstep_us: float
    context: int
    skew: float
    weight_bits: int

    def lines(self) -> list[str]:
        kind = KINDS[self.gpu]
        memory, flops = kind.bandwidth * REACHED_BANDWIDTH / 1e12, kind.flops * REACHED_FLOPS / 1e12
        measured = "measured" if self.gpu == MEASURED else f"an {MEASURED.upper()}'s shares of the datasheet's peaks"
        return [
            f"These are estimates: {self._margin()}",
            f"Assumed: {self.gpu} reaches {memory:.2f} TB/s and {flops:.0f} Tflop/s ({measured}; "
            f"kernels/bench/floors.py); {self._link()}; co-located GPUs that share experts do so by "
            f"{self._together()}; steps run as CUDA graphs; {self.context} tokens of context; "
            f"the hottest GPU's experts get {self.skew:g} times the mean.",
        ]

    def _margin(self) -> str:
        within = (
            f"within {MARGIN:.0%} of 20 layer times measured on 4 H200 of one node, shared by all, 2 + 2 or "
            "1 + 3, with Qwen3-30B-A3B's shapes in bfloat16 without a context "
            "(docs/log/2026-11.md, layer times by mode)"
        )
        others = ["other splits"] + ([f"the {self.gpu}"] if self.gpu != MEASURED else [])
        others += [f"{self.weight_bits}-bit weights"] if self.weight_bits != 16 else []
        others += ["several nodes"] if self.across else []
        return f"{within}; nothing was measured of {', '.join(others)}."

    def _together(self) -> str:
        if self.across:
            layer = f"lock-step over NCCL, {2 * self.lockstep_us:,.0f} us a layer (ADR 7)"
            return f"{layer}, or by seats that share memory (ADR 13) where they are of one node"
        return "seats that share memory, too (ADR 13)"

    def _link(self) -> str:
        inside = f"rows go through shared memory in {_figures(self.inside)} (ADR 5), a call for each attention worker"
        if self.across:
            across = f"rows cross nodes in {_figures(self.across)} (a guess: set --across-us, --across-gb)"
            return f"{across}; in a node {inside}"
        return f"disaggregated, {inside}"


def _figures(link: Link) -> str:
    return f"{link.latency * 1e6:g} us + bytes at {link.bandwidth / 1e9:.0f} GB/s one way"
