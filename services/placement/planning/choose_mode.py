"""Attention and experts colocated or disaggregated: which takes less time by :mod:`layer_times`, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from services.errors import ConfigError
from services.placement.planning.layer_times import INF, Batch, Gpus, LayerTimes, Link, Shapes

Choice = Literal["colocated", "disaggregated", "pingpong"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """Seconds per layer of the three ways, each at its best split, inf where weights, keys and values do not fit.

    ``degree``: GPUs that share one copy of the experts if colocated; with 1 each has all, and no row crosses a link.
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


class DoesNotFit(ConfigError):
    """The weights, or the keys and values of the batch, fit in no way."""


def choose_mode(
    shapes: Shapes,
    link: Link,
    gpus: Gpus,
    batch: Batch,
    *,
    together: Callable[[int], Link] | None = None,
    pingpong: bool = True,
) -> Mode:
    """Return the fastest of the three by the equations of :mod:`layer_times`; colocated if disaggregated is no faster.
    No GPU is left without an expert of its own.

    ``together``: the link among so many colocated GPUs, a divisor of their count; ``link`` by default. ``pingpong``:
    whether steps may be split into two micro-batches.

    Raises:
        DoesNotFit: no way has the memory.
        ConfigError: a figure is not above 0.
    """
    degrees = [degree for degree in range(1, min(gpus.count, shapes.experts) + 1) if gpus.count % degree == 0]
    links = {degree: together(degree) if together else link for degree in degrees}
    _check(shapes, link, *links.values(), gpus, batch)
    model = LayerTimes(shapes, link, gpus, batch)
    colocated, degree = min((model.colocated(degree, link), degree) for degree, link in links.items())
    counts = range(max(1, gpus.count - shapes.experts), gpus.count)
    ways = [(at, whole, halves if pingpong else INF) for at in counts for whole, halves in [model.disaggregated(at)]]
    splits = [(min(whole, halves), whole, halves, at) for at, whole, halves in ways]
    best, disaggregated, halved, attention = min(splits, default=(INF, INF, INF, 0))
    if min(colocated, best) == INF:
        each = f" of {gpus.memory / 1e9:.0f} GB" if gpus.count == 1 else f" of {gpus.memory / 1e9:.0f} GB each"
        raise DoesNotFit(
            f"{counted(gpus.count, 'GPU')}{each} cannot hold the model and a batch of {batch.tokens}.",
            hint="Use more or larger GPUs, or smaller batches.",
        )
    choice: Choice = "disaggregated" if disaggregated <= halved else "pingpong"
    choice = "colocated" if colocated <= best else choice
    return Mode(
        choice=choice,
        reason=_reason(model, choice, colocated, best, attention, degree),
        colocated_s=colocated,
        disaggregated_s=disaggregated,
        pingpong_s=halved,
        degree=degree if colocated < INF else 0,
        attention=attention if best < INF else 0,
        experts=gpus.count - attention if best < INF else 0,
    )


def _reason(model: LayerTimes, choice: Choice, colocated: float, best: float, attention: int, degree: int) -> str:
    """Return one sentence that says why."""
    count = model.gpus.count
    if choice != "colocated" and colocated < INF:
        way = "Disaggregated, in ping-pong" if choice == "pingpong" else "Disaggregated"
        return (
            f"{way}: a layer takes {best * 1e6:,.1f} us with {attention} + {count - attention} GPUs for attention and "
            f"experts, and {colocated * 1e6:,.1f} us where all {count} do both."
        )
    steps = f", with steps of at most {model.link.rows:,.0f} tokens" if model.link.rows < INF else ""
    if colocated == INF:
        return (
            "Disaggregated: no GPU has memory for attention, its requests' KV cache and its share of the experts"
            f"{steps}."
        )
    if count == 1:
        return "One GPU does all."
    share = f"{degree} GPUs share the experts" if degree > 1 else "Every GPU has all experts"
    if best == INF:
        return f"{share}: no split into attention GPUs and expert GPUs fits in memory{steps}."
    return (
        f"{share}: a layer takes {colocated * 1e6:,.1f} us, and {best * 1e6:,.1f} us if disaggregated, "
        f"{model.exchange(attention) * 1e6:,.1f} us of them for moving tokens there and back."
    )


def counted(number: int, noun: str) -> str:
    """Return ``1 GPU``, ``2 GPUs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _figures(*parts: Shapes | Link | Gpus | Batch) -> Iterator[tuple[str, float]]:
    sizes = ("dense_weights", "dense_held", "experts_held", "experts_time")
    free = (*sizes, "kv_bytes", "latency", "joined", "rows", "kernels")
    for part in parts:
        yield from ((name, getattr(part, name)) for name in part.__slots__ if name not in free)


def _check(shapes: Shapes, *others: Link | Gpus | Batch) -> None:
    for name, value in _figures(shapes, *others):
        if not value > 0:
            raise ConfigError(f"The planner cannot work with {name} = {value}.", hint="It has to be above 0.")
    if shapes.top_k > shapes.experts:
        raise ConfigError(f"A token cannot choose {shapes.top_k} of {shapes.experts} experts.", hint="Check the model.")
