"""What the frames that belong to lanes and to weights of workers that join hold."""

from __future__ import annotations

from services.fabric.tcp.frames import Message


class LaneNote(Message, frozen=True, kw_only=True):
    """About a lane that is being made: an entry of a store, or, with an empty key, that this side has it or has not."""

    key: str
    value: bytes
    problem: str = ""


class Fetch(Message, frozen=True, kw_only=True):
    """Asks for the weights of a layer's experts over the lane. Payload: their ids, int32, ascending."""

    layer: int


class Weights(Message, frozen=True, kw_only=True):
    """Announces a tensor on the lane; ``checksum`` is :func:`services.fabric.nccl.weights.checksum`."""

    layer: int
    name: str
    shape: tuple[int, ...]
    checksum: int
