"""What a layer of one decode step takes, attention and experts co-located or disaggregated: an estimate by equations.

    T tokens a step, D hidden, I expert width, E experts, K chosen, b bytes a weight, a = 2 bytes an activation,
    W weights of the dense part (projections, router, shared experts), V bytes of keys and values read per token,
p + q T = attention's own kernel and what a row costs in sampling and the like,
    s = hottest / mean expert load, F, M flops and bytes per second that kernels reach, l one launch, N GPUs

    dense part on n GPUs     A(T, n) = p + q T / n + max(2 W T / n + V T / n over F, b W + V T / n over M)
                             launches  L = 12 l
    one call of the experts  X(T, n) = c + r sqrt((6 D I T K s / n over f F)^2 + (3 D I b H / n over M)^2),  c = 3 l
      on n GPUs, T rows in   H = E (1 - (1 - K / E)^T) experts are hit, so that their weights are read
                             r of quantised experts by T K / H, rows of one that is hit, as measured; 1 of others
    copies of a row to n     R(n) = n (1 - (1 - 1 / n)^K)            a row goes once to each GPU that has experts of it
    one way over the link    C = B + latency, B = bytes / bandwidth  bytes = those of the busier end, D a each row

A link that joins has all senders' rows in one call, X(T, n). Through shared memory every sender has a step of its own
(ADR 5), so p senders make p calls, and each reads the weights that it hits: Y(T, p, n) = p X(T / p, n).

    co-located by 1          A(U, 1) + L + X(U, 1),  U = T / N
    co-located by g, joined  A(U, g) + L + 2 C + X(U, g),  U = T g / N,  C for s U R(g) (g - 1) / g^2 rows
                 not joined  A(U, g) + 2 B + Y(U, g, g) + u (L + 2 latency)
    disaggregated, n + m = N A(T, n) + L + 2 C + X(T, m),  C for max(T R(m) / n, s T R(m) / m) rows
                 not joined  Y(T, n, m) + u (A(T, n) + L + 2 C) for n > 1: another's call runs meanwhile
    the same in ping-pong    max(2 (A + L), Y(T, 2 n, m) or 2 X, 2 C, A + L + 2 C + X),  of T / 2, and one call's X

u = 1/2: two seats that serve two senders in the same order hide one's dense part and exchange behind the other's call;
in opposite orders both seats wait for it. Which happens is left to chance. The last row is MegaScale-Infer's condition:
two micro-batches take turns, and each stage either is the one that never waits or is hidden.

Memory is for weights, and on GPUs with attention for the keys and values of their share of the batch. Left out:
launches by the host (steps are taken to be CUDA graphs), and that disaggregated experts scale without attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import hypot, log

ACTIVATION_BYTES = 2
INF = float("inf")
MARGIN = 0.25
"""Greatest error of the estimates against 20 measured layer times, none of which these figures were drawn from:
Qwen3-30B-A3B's shapes in bfloat16 on 4 H200 (docs/log/2026-11.md, layer times by mode). See test_layer_times.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """A model's sizes in elements.

    ``weight_bytes``: per weight, as far as times go. ``dense_weights``: of a layer; 0 stands for 4 hidden^2.
    ``dense_held``: their bytes, if some are held quantised. ``experts_held``: bytes of all experts of a layer, if they
    are; ``experts_time``: rows of an expert that is hit -> what a call takes over one with ``weight_bytes``.
    """

    hidden: int
    expert_width: int
    experts: int
    top_k: int
    layers: int
    weight_bytes: float = 2.0
    dense_weights: int = 0
    dense_held: float = 0.0
    experts_held: float = 0.0
    experts_time: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link between two GPUs: bytes per second that one sends while it receives as many, seconds for an empty message.

    ``joined``: experts take the rows of all senders in one call. ``rows``: the most that one GPU sends in a step.
    """

    bandwidth: float
    latency: float
    joined: bool = True
    rows: float = INF


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What kernels cost beyond bytes and flops, on an H200 (kernels/bench/results.csv).

    ``launch_s``: a kernel with next to no work inside a CUDA graph (route, 1 row: 1.53 us). ``dense``: kernels of the
    dense part. ``call``: kernels of one call of the experts (1 row of Qwen3-30B's: 22.05 us, its bytes 17.56).
    ``grouped``: share of a plain product's flops that grouped products reach (8,192 rows: 449 of 790 Tflop/s).
    ``attention_s`` and ``row_s``: p and q of the equations; 0 for layers without attention.
    """

    launch_s: float = 1.5e-6
    dense: int = 12
    call: int = 3
    grouped: float = 0.57
    attention_s: float = 0.0
    row_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """``count`` equal GPUs: bytes per second from memory, floating-point operations per second, bytes of memory."""

    count: int
    bandwidth: float
    flops: float
    memory: float
    kernels: Kernels = field(default_factory=Kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """``tokens`` of one step on all GPUs together; ``kv_bytes`` read per token and layer; ``skew`` of the experts."""

    tokens: int
    kv_bytes: float = 0.0
    skew: float = 1.0


UNHIDDEN = 0.5
"""The u of the equations."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The equations of the module's docstring, seconds; inf where memory or a link's rows do not suffice.

    ``link`` is between attention and disaggregated experts.
    """

    shapes: Shapes
    link: Link
    gpus: Gpus
    batch: Batch

    def colocated(self, degree: int, link: Link) -> float:
        """``degree`` GPUs share one copy of the experts and of the rows, over ``link``."""
        tokens = self.batch.tokens * degree / self.gpus.count
        held = self._held_bytes() / degree + self._dense_bytes() + self._kv_bytes(self.gpus.count)
        if held > self.gpus.memory / self.shapes.layers:
            return INF
        dense = self._dense(tokens, degree)
        if degree == 1:
            return dense + self._launches() + self._call(tokens, 1)
        if self.batch.tokens / self.gpus.count > link.rows:
            return INF
        rows = self.batch.skew * tokens * self._copies(degree) * (degree - 1) / degree**2
        moving, waiting = 2 * self._moving(link, rows), 2 * link.latency
        calls = self._calls(link, tokens, degree, degree)
        if link.joined:
            return dense + self._launches() + moving + waiting + calls
        return dense + moving + calls + UNHIDDEN * (self._launches() + waiting)

    def disaggregated(self, attention: int) -> tuple[float, float]:
        """Return the times with attention on ``attention`` GPUs and experts on the rest: with one batch, and with two
        micro-batches in ping-pong."""
        experts = self.gpus.count - attention
        memory = self.gpus.memory / self.shapes.layers
        if self._held_bytes() / experts > memory or self._dense_bytes() + self._kv_bytes(attention) > memory:
            return INF, INF
        if self.batch.tokens / attention > self.link.rows:
            return INF, INF
        return self._one_batch(attention, experts), self._pingpong(attention, experts)

    def exchange(self, attention: int) -> float:
        """Return the time that one batch's rows take to disaggregated experts and back."""
        return 2 * self._one_way(self.batch.tokens, attention, self.gpus.count - attention)

    def _one_batch(self, attention: int, experts: int) -> float:
        tokens = self.batch.tokens
        before = self._dense(tokens, attention) + self._launches() + self.exchange(attention)
        calls = self._calls(self.link, tokens, attention, experts)
        alone = self.link.joined or attention == 1
        return calls + before * (1.0 if alone else UNHIDDEN)

    def _pingpong(self, attention: int, experts: int) -> float:
        half = self.batch.tokens / 2
        dense = self._dense(half, attention) + self._launches()
        moving = 2 * self._one_way(half, attention, experts)
        senders = 1 if self.link.joined else attention
        one = self._call(half / senders, experts)
        return max(2 * dense, 2 * senders * one, moving, dense + moving + one)

    def _calls(self, link: Link, tokens: float, senders: int, count: int) -> float:
        calls = 1 if link.joined else senders
        return calls * self._call(tokens / calls, count)

    def _call(self, tokens: float, count: int) -> float:
        shapes, gpus = self.shapes, self.gpus
        hit = 1 - (1 - shapes.top_k / shapes.experts) ** tokens
        rows = tokens * shapes.top_k * (self.batch.skew if count > 1 else 1.0) / count
        flops = 6 * shapes.hidden * shapes.expert_width * rows / (gpus.flops * gpus.kernels.grouped)
        moved = self._expert_bytes() * hit / count / gpus.bandwidth
        ratio = between_points(shapes.experts_time, tokens * shapes.top_k / (shapes.experts * hit))
        return gpus.kernels.call * gpus.kernels.launch_s + ratio * hypot(flops, moved)

    def _dense(self, tokens: float, count: int) -> float:
        kv = self.batch.kv_bytes * tokens / count
        flops = 2 * self._dense_weights() * tokens / count + kv
        least = max(flops / self.gpus.flops, (self._dense_bytes() + kv) / self.gpus.bandwidth)
        kernels = self.gpus.kernels
        return kernels.attention_s + kernels.row_s * tokens / count + least

    def _launches(self) -> float:
        return self.gpus.kernels.dense * self.gpus.kernels.launch_s

    def _one_way(self, tokens: float, attention: int, experts: int) -> float:
        rows = tokens * self._copies(experts)
        busiest = max(rows / attention, (self.batch.skew if experts > 1 else 1.0) * rows / experts)
        return self.link.latency + self._moving(self.link, busiest)

    def _moving(self, link: Link, rows: float) -> float:
        return rows * self.shapes.hidden * ACTIVATION_BYTES / link.bandwidth

    def _copies(self, count: int) -> float:
        return count * (1 - (1 - 1 / count) ** self.shapes.top_k)

    def _dense_weights(self) -> int:
        return self.shapes.dense_weights or 4 * self.shapes.hidden**2

    def _dense_bytes(self) -> float:
        return self.shapes.dense_held or self._dense_weights() * self.shapes.weight_bytes

    def _kv_bytes(self, count: int) -> float:
        """Return the bytes of a layer's keys and values on each of ``count`` GPUs that share the batch."""
        return self.batch.kv_bytes * self.batch.tokens / count

    def _held_bytes(self) -> float:
        return self.shapes.experts_held or self._expert_bytes()

    def _expert_bytes(self) -> float:
        shapes = self.shapes
        return 3 * shapes.hidden * shapes.expert_width * shapes.weight_bytes * shapes.experts


def between_points(points: tuple[tuple[float, float], ...], at: float) -> float:
    """Return the value at ``at`` of the lines between ``points``, whose first numbers ascend and are taken by their
    logarithm; beyond them that of the nearest one, and 1 where there are none.

    >>> between_points(((1, 0.5), (4, 1.5)), 2), between_points(((1, 0.5), (4, 1.5)), 100)
    (1.0, 1.5)
    """
    if not points:
        return 1.0
    for (before, low), (after, high) in pairwise(points):
        if at < after:
            share = log(max(at, before) / before) / log(after / before)
            return low + share * (high - low)
    return points[-1][1]
