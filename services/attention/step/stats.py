"""Figures of an engine, for metrics. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.fabric.link import ExchangeTime


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A reading of the engine: current levels, totals since the start, figures of the last step, more totals."""

    running: int
    waiting: int
    kv_blocks: int
    kv_used: int
    kv_cached: int
    kv_empty: int

    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    prefill_chunks: int
    prefill_tokens: int
    decode_tokens: int
    steps: int
    draft_chains: int = 0
    """How often a sequence had drafts in a step; how many these were, and how many of them were accepted."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_step_experts: int = 0
    """Experts that a sample of the steps with drafts had computed, and those of them that drafts alone had chosen."""
    woken_experts: int = 0
    drafting_failures: Mapping[str, int] = field(default_factory=dict)
    """What ended drafting, by reason."""

    step_tokens: int
    step_seconds: float
    step_overlapped: bool

    overlapped_steps: int
    """Steps that ran as two micro-batches. This and the fields below are totals."""
    exchange_wait_seconds: float
    steps_ahead: int
    """Steps that were launched before the previous step was read."""
    graph_steps: int
    """Steps that ran as a CUDA graph; a step that ran again counts again."""
    graphs: int
    """CUDA graphs that were captured."""
    graph_failures: int = 0
    """Captures that failed."""
    step_failures: Mapping[str, int] = field(default_factory=dict)
    """Steps that failed, by reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """What took how long since this was last asked for. Seconds."""

    batch_waits: Iterable[float] = ()
    """Of sequences, from their arrival to their first step."""
    prefills: Iterable[float] = ()
    """Of sequences, from their first step to their first token."""
    exchanges: Iterable[ExchangeTime] = ()
    """Of steps."""
    draftings: Iterable[float] = ()
    """Of steps with drafts: until these were made."""
    verifications: Iterable[float] = ()
    """Of steps with drafts, from then on."""


def taken(times: deque[float]) -> list[float]:
    """Return ``times``, which are gone afterwards."""
    return [times.popleft() for _ in range(len(times))]
