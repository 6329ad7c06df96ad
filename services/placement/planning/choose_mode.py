"""Attention and experts on the same GPUs or apart: which takes less time by :mod:`layer_times`, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.errors import ConfigError
from services.placement.planning.layer_times import INF, Batch, Gpus, LayerTimes, Link, Shapes

Choice = Literal["colocated", "apart", "apart_pingpong"]


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


def choose_mode(shapes: Shapes, link: Link, gpus: Gpus, batch: Batch, together: Link | None = None) -> Mode:
    """The fastest of the three by the equations of :mod:`layer_times`; co-located where apart is no faster.

    ``together``: the link among co-located GPUs, a divisor of their count at a time; ``link`` unless told.

    Raises:
        ConfigError: the weights fit in no way, or a figure is not above 0.
    """
    _check(shapes, link, together or link, gpus, batch)
    model = LayerTimes(shapes, link, together or link, gpus, batch)
    degrees = [degree for degree in range(1, gpus.count + 1) if gpus.count % degree == 0]
    colocated, degree = min((model.colocated(degree), degree) for degree in degrees)
    splits = [(min(times := model.apart(attention)), *times, attention) for attention in range(1, gpus.count)]
    best, apart, pingpong, attention = min(splits, default=(INF, INF, INF, 0))
    if min(colocated, best) == INF:
        raise ConfigError(
            f"{gpus.count} GPUs of {gpus.memory / 1e9:.0f} GB cannot hold the model.", hint="Use more, or quantise it."
        )
    choice: Choice = "colocated" if colocated <= best else "apart" if apart <= pingpong else "apart_pingpong"
    return Mode(
        choice=choice,
        reason=_reason(model, choice, colocated, best, attention, degree),
        colocated_s=colocated,
        apart_s=apart,
        apart_pingpong_s=pingpong,
        degree=degree if colocated < INF else 0,
        attention=attention if best < INF else 0,
        experts=gpus.count - attention if best < INF else 0,
    )


def _reason(model: LayerTimes, choice: Choice, colocated: float, best: float, attention: int, degree: int) -> str:
    """One sentence."""
    count = model.gpus.count
    if choice != "colocated" and colocated < INF:
        ways = "in ping-pong" if choice == "apart_pingpong" else "even without ping-pong"
        return (
            f"Apart, {ways}: a layer takes {best * 1e6:.1f} us on {attention} + {count - attention} GPUs "
            f"and {colocated * 1e6:.1f} us on the same {count}."
        )
    if colocated == INF:
        return f"Apart: {count} GPUs have no memory for attention beside the experts."
    if best == INF:
        return f"Co-located: {count} GPUs cannot be split so that the experts fit."
    share = f"experts shared by {degree} GPUs" if degree > 1 else "all experts on every GPU"
    return (
        f"Co-located, {share}: a layer takes {colocated * 1e6:.1f} us, apart {best * 1e6:.1f} us, "
        f"where moving rows there and back takes {model.exchange(attention) * 1e6:.1f} us."
    )


def _figures(*parts: Shapes | Link | Gpus | Batch) -> Iterator[tuple[str, float]]:
    unchecked = ("kv_bytes", "latency", "joined", "kernels", "dense_weights")
    for part in parts:
        yield from ((name, getattr(part, name)) for name in part.__slots__ if name not in unchecked)


def _check(shapes: Shapes, link: Link, together: Link, gpus: Gpus, batch: Batch) -> None:
    for name, value in _figures(shapes, link, together, gpus, batch):
        if not value > 0:
            raise ConfigError(f"The planner cannot work with {name} = {value}.", hint="It has to be above 0.")
    if shapes.top_k > shapes.experts:
        raise ConfigError(f"A token cannot choose {shapes.top_k} of {shapes.experts} experts.", hint="Check the model.")
