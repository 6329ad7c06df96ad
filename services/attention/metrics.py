"""Brings the worker's series up to date from readings of the engine, the experts and the links."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import Counter, Histogram

from services.attention.step.stats import Durations, EngineStats
from services.metrics import ALL_LAYERS, TOP_EXPERTS, WorkerMetrics

HALF_LIFE_S = 30.0
"""How fast rows of the past lose weight: the busiest experts are those of about the last minute."""
SHARD = "0"
"""Label of all experts of this process: they are one shard."""


class Growth:
    """Brings counters up to totals that are kept elsewhere."""

    def __init__(self) -> None:
        self._seen: dict[Counter, float] = {}

    def skip(self, counter: Counter, total: float) -> None:
        """Do not count what has come together by now."""
        self._seen[counter] = total

    def follow(self, counter: Counter, total: float) -> float:
        """Add to ``counter`` what has come since the last call, and return it. A total that fell began again."""
        seen = self._seen.get(counter, 0)
        new = total - seen if total >= seen else total
        self._seen[counter] = total
        if new:
            counter.inc(new)
        return new


class StepObserver:
    """Brings the engine's series up to date after each step. Runs on the engine's thread.

    Args:
        take: returns what was timed since its last call.
        exemplar: returns what names the trace of a request of the last step, if one is traced.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        read: Callable[[], EngineStats],
        take: Callable[[], Durations] = Durations,
        exemplar: Callable[[], dict[str, str] | None] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._read, self._take, self._exemplar = read, take, exemplar
        self._growth = Growth()
        self._used, self._cached, self._free = (metrics.kv_blocks.labels(state) for state in ("used", "cached", "free"))
        self._totals = {
            "prefix_query_tokens": metrics.prefix_queries,
            "prefix_hit_tokens": metrics.prefix_hits,
            "preemptions": metrics.preemptions,
            "prefill_chunks": metrics.prefill_chunks,
            "prefill_tokens": metrics.prefill_tokens,
            "decode_tokens": metrics.decode_tokens,
            "draft_chains": metrics.draft_chains,
            "draft_tokens": metrics.draft_tokens,
            "accepted_tokens": metrics.accepted_tokens,
            "draft_step_experts": metrics.draft_step_experts,
            "woken_experts": metrics.woken_experts,
            "overlapped_steps": metrics.overlapped_steps,
            "steps_ahead": metrics.steps_ahead,
            "exchange_wait_seconds": metrics.exchange_wait,
            "graph_steps": metrics.graph_steps,
        }
        self._exchanges: dict[str, tuple[Histogram, Histogram]] = {}
        self.busy_s = 0.0
        """Seconds spent in steps since the start."""
        self.lanes = 1
        """Micro-batches of the last step."""
        self.after_step()

    def after_step(self) -> None:
        reading, metrics = self._read(), self._metrics
        self._set_levels(reading)
        if not self._growth.follow(metrics.steps, reading.steps):
            return
        self.busy_s += reading.step_seconds
        self.lanes = 2 if reading.step_overlapped else 1
        metrics.engine_busy.inc(reading.step_seconds)
        metrics.step_time.observe(reading.step_seconds, self._exemplar())
        metrics.batch_tokens.observe(reading.step_tokens)
        for name, counter in self._totals.items():
            self._growth.follow(counter, getattr(reading, name))
        for reason, count in reading.step_failures.items():
            self._growth.follow(metrics.step_failures.labels(reason), count)
        for reason, count in reading.drafting_failures.items():
            self._growth.follow(metrics.drafting_failures.labels(reason), count)
        self._observe(self._take())

    def _observe(self, durations: Durations) -> None:
        for seconds in durations.batch_waits:
            self._metrics.batch_wait.observe(seconds)
        for seconds in durations.prefills:
            self._metrics.prefill_time.observe(seconds)
        for seconds in durations.draftings:
            self._metrics.draft_steps.labels("drafting").observe(seconds)
        for seconds in durations.verifications:
            self._metrics.draft_steps.labels("verification").observe(seconds)
        for step in durations.exchanges:
            dispatch, combine = self._exchanges_of(step.transport)
            dispatch.observe(step.dispatch_s)
            combine.observe(step.combine_s)

    def _exchanges_of(self, transport: str) -> tuple[Histogram, Histogram]:
        """Return the series of ``transport``; finding them by their labels would take longer than both observations."""
        if transport not in self._exchanges:
            labels = self._metrics.exchange_time.labels
            self._exchanges[transport] = labels(transport, "dispatch"), labels(transport, "combine")
        return self._exchanges[transport]

    def _set_levels(self, reading: EngineStats) -> None:
        self._metrics.graphs.set(reading.graphs)
        self._growth.follow(self._metrics.graph_failures, reading.graph_failures)
        self._metrics.running.set(reading.running)
        self._metrics.waiting.set(reading.waiting)
        self._metrics.kv_usage.set(reading.kv_used / reading.kv_blocks)
        self._used.set(reading.kv_used)
        self._cached.set(reading.kv_cached)
        self._free.set(reading.kv_empty)


class ExpertObserver:
    """Counts rows, and shows the share of the busiest experts: of each layer with ``by_layer``, else the mean share.

    ``read`` returns totals by layer and expert. Only what is added from now on counts.
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
        """Show the share of the busiest expert, the second busiest and so on, as means over the layers."""
        loads = [(sorted(recent, reverse=True), total) for recent in self._recent.values() if (total := sum(recent))]
        for rank in range(min(TOP_EXPERTS, *(len(load) for load, _ in loads)) if loads else 0):
            mean = sum(load[rank] / total for load, total in loads) / len(loads)
            self._metrics.expert_top_share.labels(ALL_LAYERS, rank + 1).set(mean)


class TotalsObserver:
    """Brings ``counter`` up to the totals that ``read`` returns by the value of its label, or by those of its labels.

    Args:
        from_now: leave out what has come together by now.
    """

    def __init__(self, counter: Counter, read: Callable[[], Mapping[Any, float]], *, from_now: bool = False) -> None:
        self._counter, self._read = counter, read
        self._growth = Growth()
        for label, total in read().items() if from_now else ():
            self._growth.skip(self._labelled(label), total)

    def refresh(self) -> None:
        for label, total in self._read().items():
            self._growth.follow(self._labelled(label), total)

    def _labelled(self, label: Any) -> Counter:
        return self._counter.labels(*label) if isinstance(label, tuple) else self._counter.labels(label)


class SharingLink(Protocol):
    """The readings of :class:`services.fabric.shared_memory.link.SharedMemoryLink`."""

    @property
    def shared_steps(self) -> int: ...
    @property
    def repeated_steps(self) -> int: ...
    def shared_seats(self) -> int: ...


class SharingObserver:
    """Shows how many seats share memory; counts steps that used it and steps that ran again, from now on."""

    def __init__(self, metrics: WorkerMetrics, link: SharingLink) -> None:
        self._metrics, self._link, self._growth = metrics, link, Growth()
        self._growth.skip(metrics.shared_steps, link.shared_steps)
        self._growth.skip(metrics.repeated_steps, link.repeated_steps)

    def refresh(self) -> None:
        self._metrics.shared_seats.set(self._link.shared_seats())
        self._growth.follow(self._metrics.shared_steps, self._link.shared_steps)
        self._growth.follow(self._metrics.repeated_steps, self._link.repeated_steps)
