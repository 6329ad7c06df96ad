"""Attention and experts co-located or disaggregated: which takes less time by :mod:`layer_times`, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from services.errors import ConfigError
from services.placement.planning.layer_times import INF, Batch, Gpus, LayerTimes, Link, Shapes

Choice = Literal["colocated", "disaggregated", "pingpong"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """Seconds per layer of the three ways, each at its best split, inf where the weights do not fit.

    ``degree``: GPUs that share one copy of the experts if co-located; with 1 each has all, and no row crosses a link.
    ``attention`` + ``experts``: GPUs if disaggregated, for the faster of these two ways. 0 where nothing fits.
    """

    choice: Choice
    reason: str
    colocated_s: float
    disaggregated_s: float
    pingpong_s: float
    degree: int
    attention: int
    experts: int


def choose_mode(
    shapes: Shapes, link: Link, gpus: Gpus, batch: Batch, together: Callable[[int], Link] | None = None
) -> Mode:
    """Return the fastest of the three by the equations of :mod:`layer_times`; co-located if disaggregated is no faster.

    ``together``: the link among so many co-located GPUs, a divisor of their count; ``link`` by default.

    Raises:
        ConfigError: the weights fit in no way, or a figure is not above 0.
    """
    degrees = [degree for degree in range(1, gpus.count + 1) if gpus.count % degree == 0]
    links = {degree: together(degree) if together else link for degree in degrees}
    _check(shapes, link, *links.values(), gpus, batch)
    model = LayerTimes(shapes, link, gpus, batch)
    colocated, degree = min((model.colocated(degree, link), degree) for degree, link in links.items())
    splits = [(min(times := model.disaggregated(attention)), *times, attention) for attention in range(1, gpus.count)]
    best, disaggregated, pingpong, attention = min(splits, default=(INF, INF, INF, 0))
    if min(colocated, best) == INF:
        raise ConfigError(
            f"{gpus.count} GPUs of {gpus.memory / 1e9:.0f} GB cannot hold the model.", hint="Use more, or quantise it."
        )
    choice: Choice = "disaggregated" if disaggregated <= pingpong else "pingpong"
    choice = "colocated" if colocated <= best else choice
    return Mode(
        choice=choice,
        reason=_reason(model, choice, colocated, best, attention, degree),
        colocated_s=colocated,
        disaggregated_s=disaggregated,
        pingpong_s=pingpong,
        degree=degree if colocated < INF else 0,
        attention=attention if best < INF else 0,
        experts=gpus.count - attention if best < INF else 0,
    )


def _reason(model: LayerTimes, choice: Choice, colocated: float, best: float, attention: int, degree: int) -> str:
    """Return one sentence that says why."""
    count = model.gpus.count
    if choice != "colocated" and colocated < INF:
        ways = "in ping-pong" if choice == "pingpong" else "even without ping-pong"
        return (
            f"Disaggregated, {ways}: a layer takes {best * 1e6:.1f} us on {attention} + {count - attention} GPUs "
            f"and {colocated * 1e6:.1f} us on the same {count}."
        )
    if colocated == INF:
        return f"Disaggregated: no GPU of {count} has memory for attention and its share of the experts."
    if best == INF:
        return f"Co-located: {count} GPUs cannot be split so that the experts fit."
    share = f"experts shared by {degree} GPUs" if degree > 1 else "all experts on every GPU"
    return (
        f"Co-located, {share}: a layer takes {colocated * 1e6:.1f} us, disaggregated {best * 1e6:.1f} us, "
        f"where moving rows there and back takes {model.exchange(attention) * 1e6:.1f} us."
    )


def _figures(*parts: Shapes | Link | Gpus | Batch) -> Iterator[tuple[str, float]]:
    unchecked = ("kv_bytes", "latency", "joined", "kernels", "dense_weights")
    for part in parts:
        yield from ((name, getattr(part, name)) for name in part.__slots__ if name not in unchecked)


def _check(shapes: Shapes, *others: Link | Gpus | Batch) -> None:
    for name, value in _figures(shapes, *others):
        if not value > 0:
            raise ConfigError(f"The planner cannot work with {name} = {value}.", hint="It has to be above 0.")
    if shapes.top_k > shapes.experts:
        raise ConfigError(f"A token cannot choose {shapes.top_k} of {shapes.experts} experts.", hint="Check the model.")
