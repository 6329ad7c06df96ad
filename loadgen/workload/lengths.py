"""Lengths of prompts and answers, where nobody says others."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.workload.words import Lengths

EXPERT_FLOW_REQUESTS = 2560
LENGTHS: Mapping[str, tuple[Lengths, Lengths]] = {
    "lengths": (Lengths(8, 128), Lengths(1, 128)),
    "expertflow": (Lengths(8, 128), Lengths(1, 128)),
    "chat": (Lengths(16, 64), Lengths(16, 64)),
    "agents": (Lengths(64, 256), Lengths(16, 64)),
    "long": (Lengths(2048, 8192), Lengths(16, 128)),
    "trace": (Lengths(1, 1), Lengths(1, 1)),
    "file": (Lengths(1, 1), Lengths(128, 128)),
    "hot-experts": (Lengths(1, 1), Lengths(32, 32)),
}
"""Of prompts and answers, by workload; those of ExpertFlow are of its thesis (6.2.3.1)."""
