"""Messages about lanes, and about weights for workers that join."""

from __future__ import annotations

from services.fabric.tcp.frames import Message


class LaneNote(Message, frozen=True, kw_only=True):
    """An entry of a lane's stores; an empty key says that this side has the lane or, with a problem, has none."""

    key: str
    value: bytes
    problem: str = ""


class Fetch(Message, frozen=True, kw_only=True):
    """Asks for the weights of a layer's experts over the lane. Payload: their ids, int32, ascending."""

    layer: int


class Weights(Message, frozen=True, kw_only=True):
    """Announces a tensor on the lane, with its :func:`services.fabric.nccl.weights.checksum`, as the release before
    does: a dense matrix, in the serving dtype."""

    layer: int
    name: str
    shape: tuple[int, ...]
    checksum: int


class TypedWeights(Weights, frozen=True, kw_only=True):
    """Announces a dense matrix, or one of several tensors of a quantised one. ``dtype`` is torch's name; it is empty
    where the other side is of the release before, which in turn does not read it."""

    dtype: str = ""
