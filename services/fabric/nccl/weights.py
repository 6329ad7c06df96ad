"""Sends a group's weights from a seat that holds them to a worker that joins: tensor by tensor over the lane.

joiner -> FETCH    a layer and the experts wanted of it, for all layers at once
seat   -> WEIGHTS  one tensor's name, shape, type and checksum; the tensor itself follows on the lane
seat   -> FAILED   it holds other experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.errors import CallFailed, LaneFailed, WireError
from services.fabric.nccl.messages import Fetch, TypedWeights
from services.fabric.tcp.connect import Facts, connect, prove
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import Failed, Frame, Kind, message_of
from services.fabric.tcp.peer import Peer, deadline_in
from services.routing import Seat

LayerTensors = Mapping[str, Tensor]
"""A layer's tensors by name, expert by expert in the order of the group."""
Form = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and type."""
Forms = Mapping[int, Mapping[str, Form]]
Take = Callable[[int, str, Tensor], None]
"""``(layer, name, tensor)``: called with each tensor that has come."""
_TENSOR_S = 20.0
"""Timeout for the next tensor: a seat that sends signs of life and no weights must not keep a worker from joining."""
_WORDS, _WIDTH = 1 << 24, 1 << 11
_MASK = (1 << 64) - 1


def checksum(tensor: Tensor) -> int:
    """Return 64 bits that depend on each word of the tensor's memory and its place. Computed on the tensor's device.

    Every word counts once by its row and once by its column in a table of 2048 columns, both numbered from 1.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    words = flat.view(torch.int32) if len(flat) % 4 == 0 else flat
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in torch.split(words, _WORDS):
        padded = torch.nn.functional.pad(block, (0, -len(block) % _WIDTH)).view(-1, _WIDTH)
        by_row, by_column = padded.sum(1, dtype=torch.int64), padded.sum(0, dtype=torch.int64)
        total = total * 1_000_003 + _numbered(by_row) * 8191 + _numbered(by_column)
    return int(total) & _MASK


def _numbered(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


class WeightsGiver(ServerExtension):
    """Sends weights to workers that join.

    Args:
        held: layer -> ids of the experts held here, and their tensors.
    """

    def __init__(self, held: Mapping[int, tuple[tuple[int, ...], LayerTensors]]) -> None:
        self._held = held

    def take(self, peer: Peer, frame: Frame) -> bool:
        if frame.kind != Kind.FETCH:
            return False
        wanted = message_of(frame, Fetch)
        if len(frame.payload) % 4:
            raise WireError(f"{peer.name} asked for experts in {len(frame.payload)} bytes.")
        self._give(peer, wanted.layer, tuple(frame.payload.view(torch.int32).tolist()))
        return True

    def _give(self, peer: Peer, layer: int, ids: tuple[int, ...]) -> None:
        of_layer = self._held.get(layer)
        if of_layer is None or of_layer[0] != ids or peer.lane is None:
            problem = f"these experts of layer {layer} are not held here" if peer.lane else "there is no lane"
            peer.send(Kind.FAILED, Failed(call=0, code=CallFailed.code, message=f"No weights: {problem}."))
            return
        for name, tensor in of_layer[1].items():
            with peer.reading():
                message = _announcement(layer, name, tensor)
            peer.send(Kind.WEIGHTS, message, rows=tensor, by_lane=True)


def _announcement(layer: int, name: str, tensor: Tensor) -> TypedWeights:
    return TypedWeights(
        layer=layer, name=name, shape=tuple(tensor.shape), checksum=checksum(tensor), dtype=_name(tensor.dtype)
    )


def fetch(
    seat: Seat,
    facts: Facts,
    wanted: Mapping[int, Sequence[int]],
    forms: Forms,
    stopped: Callable[[], bool] = lambda: False,
    take: Take = lambda _layer, _name, _tensor: None,
) -> dict[int, dict[str, Tensor]]:
    """Fetch weights from the worker in ``seat``: layer -> name -> tensor, on the lane's device.

    The checksums come from the same seat: they show damage on the way, and no wrong weights.

    Args:
        wanted: layer -> ids of experts.
        forms: all tensors that are to come.
        stopped: called between two tensors; once it returns True the fetch ends by CallFailed.
        take: called with each tensor; its errors end the fetch.

    Raises:
        OSError, ExpertMeshError: there is no lane, the seat was lost or holds other experts, or a checksum is wrong.
    """
    assert facts.lanes is not None
    peer, theirs = connect(seat, facts)
    try:
        prove(peer, facts.timing.handshake_s)
        if not facts.lanes.agreed(theirs, peer.name):
            raise LaneFailed(f"There can be no lane to {peer.name}.")
        facts.lanes.join(peer)
        for layer, ids in wanted.items():
            peer.send(Kind.FETCH, Fetch(layer=layer), [torch.tensor(ids, dtype=torch.int32)])
        found: dict[int, dict[str, Tensor]] = {layer: {} for layer in forms}
        for _ in range(sum(map(len, forms.values()))):
            message = _next_weights(peer, stopped)
            form = forms.get(message.layer, {}).get(message.name)
            if form is None or message.name in found[message.layer] or not _has(message, form):
                raise WireError(
                    f"{peer.name} sent {message.name} {message.dtype} {message.shape} of layer {message.layer}, "
                    f"expected {'nothing' if form is None else f'{_name(form[1])} {form[0]}'}."
                )
            found[message.layer][message.name] = tensor = _receive(peer, message, form[1], facts.lanes.device)
            take(message.layer, message.name, tensor)
        return found
    finally:
        peer.close()


def _has(message: TypedWeights, form: Form) -> bool:
    shape, dtype = form
    return message.shape == shape and message.dtype in ("", _name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _next_weights(peer: Peer, stopped: Callable[[], bool]) -> TypedWeights:
    until = deadline_in(_TENSOR_S)
    while not stopped():
        frame = peer.receive(until)
        if frame.kind == Kind.FAILED:
            raise CallFailed(f"{peer.name} sent no weights: {message_of(frame, Failed).message}")
        if frame.kind == Kind.WEIGHTS:
            return message_of(frame, TypedWeights)
    raise CallFailed("Loading was stopped.")


def _receive(peer: Peer, message: TypedWeights, dtype: torch.dtype, device: torch.device) -> Tensor:
    into = torch.empty(message.shape, dtype=dtype, device=device)
    if into.is_cuda:  # kernels may still read what this memory held before
        torch.cuda.current_stream(device).synchronize()
    peer.receive_into(into)
    with peer.reading():
        came = checksum(into)
    if came != message.checksum:
        raise WireError(
            f"{message.name} of layer {message.layer} from {peer.name} has another checksum than announced."
        )
    return into
