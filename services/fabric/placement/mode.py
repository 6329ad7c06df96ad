"""Attention and experts on the same GPUs or apart: what a layer of one decode step takes either way.

Every GPU does a part's work in the time of a roofline, ``t = max(flops / F, bytes / M)``, F and M its peak rates. With

    T tokens a step, D hidden, I expert width, E experts, K chosen, b bytes a weight, a = 2 bytes an activation,
    W attention weights of a layer (4 D^2), V bytes of keys and values read per token, s = hottest / mean expert load,

    attention on n GPUs      flops = 2 W T / n + V T / n             bytes = b W + V T / n        -> A(T, n)
    experts on n GPUs        flops = 6 D I T K s / n                 bytes = 3 D I b H / n        -> X(T, n)
      experts that are hit   H = E (1 - (1 - K / E)^T)
    copies of a row to n     R(n) = n (1 - (1 - 1 / n)^K)            a row goes once to each GPU that has experts of it
    one way over the link    C = latency + bytes / bandwidth,        bytes = those of the busier end, D a each row

    co-located by g of N     A(U, g) + 2 C[s U R(g) (g - 1) / g^2] + X(U, g),  U = T g / N        C = 0 for g = 1
    apart, n + m = N         A(T, n) + 2 C[max(T R(m) / n, s T R(m) / m)] + X(T, m)
    apart in ping-pong       max(2 A(T/2, n), 2 X(T/2, m), 2 C, A(T/2, n) + X(T/2, m) + 2 C)      C, too, for T / 2

g, a divisor of N, is the degree of expert parallelism: g GPUs share one copy of the experts and of the rows; s is 1
where one GPU has all experts. The last row is MegaScale-Infer's condition: two micro-batches take turns, and each
stage either is the one that never waits or is hidden. Dispatch and combine use the link's two directions. Left out:
launch times, shared experts, memory for keys and values, overlap of two batches on co-located GPUs, and that experts
apart scale without attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.errors import ConfigError

Choice = Literal["colocated", "apart", "apart_pingpong"]

ACTIVATION_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """A model, in elements; ``weight_bytes`` per weight (0.5 for int4)."""

    hidden: int
    expert_width: int
    experts: int
    top_k: int
    layers: int
    weight_bytes: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Between two GPUs: bytes per second that one sends while it receives as many, seconds for an empty message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """``count`` alike: bytes per second from memory, floating-point operations per second, bytes of memory."""

    count: int
    bandwidth: float
    flops: float
    memory: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """``tokens`` of one step on all GPUs together; ``kv_bytes`` read per token and layer; ``skew`` of the experts."""

    tokens: int
    kv_bytes: float = 0.0
    skew: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """Seconds per layer of the three ways, each at its best split, inf where the weights do not fit.

    ``degree``: GPUs that share one copy of the experts if co-located, 1: each has all, no row crosses the link.
    ``attention`` + ``experts``: GPUs if apart, for the faster of the two ways. 0 where nothing fits.
    """

    choice: Choice
    reason: str
    colocated_s: float
    apart_s: float
    apart_pingpong_s: float
    degree: int
    attention: int
    experts: int


def choose_mode(shapes: Shapes, link: Link, gpus: Gpus, batch: Batch) -> Mode:
    """The fastest of the three by the equations above; co-located where apart is no faster.

    Raises:
        ConfigError: the weights fit in no way, or a figure is not above 0.
    """
    _check(shapes, link, gpus, batch)
    model = _Layer(shapes, link, gpus, batch)
    degrees = [degree for degree in range(1, gpus.count + 1) if gpus.count % degree == 0]
    colocated, degree = min((model.colocated(degree), degree) for degree in degrees)
    splits = [(min(times := model.apart(attention)), *times, attention) for attention in range(1, gpus.count)]
    best, apart, pingpong, attention = min(splits, default=(_INF, _INF, _INF, 0))
    if min(colocated, best) == _INF:
        raise ConfigError(
            f"{gpus.count} GPUs of {gpus.memory / 1e9:.0f} GB cannot hold the model.", hint="Use more, or quantise it."
        )
    choice: Choice = "colocated" if colocated <= best else "apart" if apart <= pingpong else "apart_pingpong"
    return Mode(
        choice=choice,
        reason=model.reason(choice, colocated, best, attention, degree),
        colocated_s=colocated,
        apart_s=apart,
        apart_pingpong_s=pingpong,
        degree=degree if colocated < _INF else 0,
        attention=attention if best < _INF else 0,
        experts=gpus.count - attention if best < _INF else 0,
    )


_INF = float("inf")


@dataclass(frozen=True, slots=True)
class _Layer:
    """The equations of the module's docstring."""

    shapes: Shapes
    link: Link
    gpus: Gpus
    batch: Batch

    def colocated(self, degree: int) -> float:
        tokens = self.batch.tokens * degree / self.gpus.count
        if self._expert_bytes() / degree + self._attention_bytes() > self.gpus.memory / self.shapes.layers:
            return _INF
        rows = tokens * self._copies(degree) * (degree - 1) / degree**2
        link = 2 * self._link(rows * self.batch.skew) if degree > 1 else 0.0
        return self._attention(tokens, degree) + link + self._experts(tokens, degree)

    def apart(self, attention: int) -> tuple[float, float]:
        """One batch, and two micro-batches in ping-pong, on ``attention`` GPUs and the rest for experts."""
        memory = self.gpus.memory / self.shapes.layers
        if self._expert_bytes() / (self.gpus.count - attention) > memory or self._attention_bytes() > memory:
            return _INF, _INF
        dense, rows, experts = self._stages(self.batch.tokens, attention)
        half_dense, half_rows, half_experts = self._stages(self.batch.tokens / 2, attention)
        in_turn = half_dense + half_experts + 2 * half_rows
        return dense + 2 * rows + experts, max(2 * half_dense, 2 * half_experts, 2 * half_rows, in_turn)

    def reason(self, choice: Choice, colocated: float, best: float, attention: int, degree: int) -> str:
        """One sentence."""
        if choice != "colocated" and colocated < _INF:
            ways = "in ping-pong" if choice == "apart_pingpong" else "even without ping-pong"
            return (
                f"Apart, {ways}: a layer takes {best * 1e6:.1f} us on {attention} + {self.gpus.count - attention} GPUs "
                f"and {colocated * 1e6:.1f} us on the same {self.gpus.count}."
            )
        if colocated == _INF:
            return f"Apart: {self.gpus.count} GPUs have no memory for attention beside the experts."
        if best == _INF:
            return f"Co-located: {self.gpus.count} GPUs cannot be split so that the experts fit."
        _, rows, _ = self._stages(self.batch.tokens, attention)
        share = f"experts shared by {degree} GPUs" if degree > 1 else "all experts on every GPU"
        return (
            f"Co-located, {share}: a layer takes {colocated * 1e6:.1f} us, apart {best * 1e6:.1f} us, "
            f"where moving rows there and back takes {2 * rows * 1e6:.1f} us."
        )

    def _stages(self, tokens: float, attention: int) -> tuple[float, float, float]:
        """Seconds of attention, of moving rows one way and of experts."""
        experts = self.gpus.count - attention
        rows = tokens * self._copies(experts)
        busiest = max(rows / attention, self._skew(experts) * rows / experts)
        return self._attention(tokens, attention), self._link(busiest), self._experts(tokens, experts)

    def _attention(self, tokens: float, count: int) -> float:
        kv = self.batch.kv_bytes * tokens / count
        weights = 4 * self.shapes.hidden**2
        return self._roofline(2 * weights * tokens / count + kv, self._attention_bytes() + kv)

    def _experts(self, tokens: float, count: int) -> float:
        shapes = self.shapes
        hit = 1 - (1 - shapes.top_k / shapes.experts) ** tokens
        rows = tokens * shapes.top_k * self._skew(count) / count
        return self._roofline(6 * shapes.hidden * shapes.expert_width * rows, self._expert_bytes() * hit / count)

    def _skew(self, count: int) -> float:
        return self.batch.skew if count > 1 else 1.0

    def _roofline(self, flops: float, moved: float) -> float:
        return max(flops / self.gpus.flops, moved / self.gpus.bandwidth)

    def _link(self, rows: float) -> float:
        return self.link.latency + rows * self.shapes.hidden * ACTIVATION_BYTES / self.link.bandwidth

    def _copies(self, count: int) -> float:
        return count * (1 - (1 - 1 / count) ** self.shapes.top_k)

    def _attention_bytes(self) -> float:
        return 4 * self.shapes.hidden**2 * self.shapes.weight_bytes

    def _expert_bytes(self) -> float:
        shapes = self.shapes
        return 3 * shapes.hidden * shapes.expert_width * shapes.weight_bytes * shapes.experts


def _figures(*parts: Shapes | Link | Gpus | Batch) -> Iterator[tuple[str, float]]:
    for part in parts:
        yield from ((name, getattr(part, name)) for name in part.__slots__ if name not in ("kv_bytes", "latency"))


def _check(shapes: Shapes, link: Link, gpus: Gpus, batch: Batch) -> None:
    for name, value in _figures(shapes, link, gpus, batch):
        if not value > 0:
            raise ConfigError(f"The planner cannot reckon with {name} = {value}.", hint="It has to be above 0.")
    if shapes.top_k > shapes.experts:
        raise ConfigError(f"A token cannot choose {shapes.top_k} of {shapes.experts} experts.", hint="Check the model.")
