"""Readings of the engine and of the experts, on their way into the worker's series."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from prometheus_client import Counter

from services.attention.step.stats import EngineStats
from services.metrics import ALL_LAYERS, TOP_EXPERTS, WorkerMetrics

HALF_LIFE_S = 30.0
"""The busiest experts are those of about the last minute."""
SHARD = "0"
"""All experts in one process are one shard."""


class StepObserver:
    """Brings the engine's series up to date after each step. Runs on the engine's thread."""

    def __init__(self, metrics: WorkerMetrics, read: Callable[[], EngineStats]) -> None:
        self._metrics = metrics
        self._read = read
        self._used, self._cached, self._free = (metrics.kv_blocks.labels(state) for state in ("used", "cached", "free"))
        self._totals: list[tuple[Counter, str, float]] = [
            (metrics.prefix_queries, "prefix_query_tokens", 0),
            (metrics.prefix_hits, "prefix_hit_tokens", 0),
            (metrics.preemptions, "preemptions", 0),
            (metrics.prefill_chunks, "prefill_chunks", 0),
            (metrics.prefill_tokens, "prefill_tokens", 0),
            (metrics.decode_tokens, "decode_tokens", 0),
            (metrics.overlapped_steps, "overlapped_steps", 0),
            (metrics.steps_ahead, "steps_ahead", 0),
            (metrics.exchange_wait, "exchange_wait_seconds", 0),
            (metrics.graph_steps, "graph_steps", 0),
        ]
        self._steps = 0
        self.busy_s = 0.0
        """In steps, since the start."""
        self.lanes = 1
        """Micro-batches of the last step."""
        self.after_step()

    def after_step(self) -> None:
        reading = self._read()
        self._set_levels(reading)
        if reading.steps == self._steps:
            return
        self._metrics.steps.inc(reading.steps - self._steps)
        self._steps = reading.steps
        self.busy_s += reading.step_seconds
        self.lanes = 2 if reading.step_overlapped else 1
        self._metrics.step_time.observe(reading.step_seconds)
        self._metrics.batch_tokens.observe(reading.step_tokens)
        self._metrics.overlapped.set(reading.step_overlapped)
        for index, (counter, name, seen) in enumerate(self._totals):
            total = getattr(reading, name)
            if total != seen:
                counter.inc(total - seen)
                self._totals[index] = (counter, name, total)

    def _set_levels(self, reading: EngineStats) -> None:
        self._metrics.graphs.set(reading.graphs)
        self._metrics.running.set(reading.running)
        self._metrics.waiting.set(reading.waiting)
        self._metrics.kv_usage.set(reading.kv_used / reading.kv_blocks)
        self._used.set(reading.kv_used)
        self._cached.set(reading.kv_cached)
        self._free.set(reading.kv_empty)


class ExpertObserver:
    """Rows, and the share of the busiest experts: of each layer where ``by_layer``, else of all and the mean share.

    ``read`` gives the totals by layer and expert; those of now are where it begins to count.
    """

    def __init__(
        self, metrics: WorkerMetrics, read: Callable[[], Mapping[int, Sequence[int]]], *, by_layer: bool = False
    ) -> None:
        self._metrics = metrics
        self._by_layer = by_layer
        self._read = read
        self._seen = dict(read())
        self._recent: dict[int, list[float]] = {}
        self._last_s = time.monotonic()

    def refresh(self) -> None:
        now_s = time.monotonic()
        fade = 0.5 ** ((now_s - self._last_s) / HALF_LIFE_S)
        self._last_s = now_s
        for layer, rows in self._read().items():
            before = self._seen.get(layer) or [0] * len(rows)
            self._seen[layer] = rows
            new = sum(rows) - sum(before)
            if new:
                self._metrics.expert_tokens.labels(layer if self._by_layer else ALL_LAYERS, SHARD).inc(new)
                recent = self._recent.get(layer) or [0.0] * len(rows)
                self._recent[layer] = [
                    old * fade + now - then for old, now, then in zip(recent, rows, before, strict=True)
                ]
                if self._by_layer:
                    self._show_busiest(layer)
        if not self._by_layer:
            self._show_mean()

    def _show_busiest(self, layer: int) -> None:
        recent = self._recent[layer]
        total = sum(recent)
        busiest = sorted(range(len(recent)), key=lambda expert: -recent[expert])[:TOP_EXPERTS]
        for rank, expert in enumerate(busiest, start=1):
            self._metrics.expert_top_share.labels(layer, rank).set(recent[expert] / total)
            self._metrics.expert_top_id.labels(layer, rank).set(expert)

    def _show_mean(self) -> None:
        """Over the layers, of the share that the busiest expert took, the second, and so on: ids say nothing then."""
        loads = [(sorted(recent, reverse=True), total) for recent in self._recent.values() if (total := sum(recent))]
        for rank in range(min(TOP_EXPERTS, *(len(load) for load, _ in loads)) if loads else 0):
            mean = sum(load[rank] / total for load, total in loads) / len(loads)
            self._metrics.expert_top_share.labels(ALL_LAYERS, rank + 1).set(mean)


class StallObserver:
    """Time spent waiting from now on, by the shard group waited for. ``read`` gives the totals in seconds."""

    def __init__(self, metrics: WorkerMetrics, read: Callable[[], Mapping[int, float]]) -> None:
        self._metrics, self._read = metrics, read
        self._seen = dict(read())

    def refresh(self) -> None:
        for group, seconds in self._read().items():
            self._metrics.shard_stall.labels(group).inc(seconds - self._seen.get(group, 0.0))
            self._seen[group] = seconds


class RefusalObserver:
    """Other workers that were refused. ``read`` gives the totals by reason."""

    def __init__(self, metrics: WorkerMetrics, read: Callable[[], Mapping[str, int]]) -> None:
        self._metrics, self._read = metrics, read
        self._seen: dict[str, int] = {}

    def refresh(self) -> None:
        for reason, count in self._read().items():
            self._metrics.refused_peers.labels(reason).inc(count - self._seen.get(reason, 0))
            self._seen[reason] = count


class SharingLink(Protocol):
    """See :class:`services.fabric.shared_memory.link.SharedMemoryLink`."""

    @property
    def shared_steps(self) -> int: ...
    @property
    def repeated_steps(self) -> int: ...
    def shared_seats(self) -> int: ...


class SharingObserver:
    """Seats that share memory, how many steps went through it from now on, and how many had to run again."""

    def __init__(self, metrics: WorkerMetrics, link: SharingLink) -> None:
        self._metrics, self._link = metrics, link
        self._seen = link.shared_steps, link.repeated_steps

    def refresh(self) -> None:
        self._metrics.shared_seats.set(self._link.shared_seats())
        now = self._link.shared_steps, self._link.repeated_steps
        for counter, new, old in zip(
            (self._metrics.shared_steps, self._metrics.repeated_steps), now, self._seen, strict=True
        ):
            counter.inc(new - old)
        self._seen = now


class LockstepTraffic(Protocol):
    """See :class:`services.fabric.lockstep.gloo.Traffic`."""

    @property
    def messages(self) -> Mapping[str, int]: ...
    @property
    def bytes(self) -> Mapping[str, int]: ...


class LockstepObserver:
    """What goes to other ranks that share the experts."""

    def __init__(self, metrics: WorkerMetrics, traffic: LockstepTraffic, turns: Callable[[], int]) -> None:
        self._metrics, self._traffic, self._turns = metrics, traffic, turns
        self._seen: dict[str, int] = {}

    def refresh(self) -> None:
        self._metrics.lockstep_turns.inc(self._new("turns", self._turns()))
        for scope in list(self._traffic.messages):
            self._metrics.lockstep_messages.labels(scope).inc(
                self._new(f"messages {scope}", self._traffic.messages[scope])
            )
            self._metrics.lockstep_bytes.labels(scope).inc(self._new(f"bytes {scope}", self._traffic.bytes[scope]))

    def _new(self, name: str, total: int) -> int:
        before, self._seen[name] = self._seen.get(name, 0), total
        return total - before
