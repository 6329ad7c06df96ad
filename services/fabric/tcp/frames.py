"""Frames between attention workers and expert workers: a fixed header, a msgpack header, raw tensor bytes.

    magic 4s | version u16 | kind u16 | header length u32 | payload length u64     (network order, 20 bytes)

Lengths are checked against a maximum before memory is allocated for them. Messages are msgpack arrays: new fields go
last and have a default; any other change is a new version (:mod:`services.fabric.tcp.versions`).

Legend: R rows of a call, D hidden size, K slots per row, P pairs.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from services.errors import ProtocolMismatch, SeatLost, WireError
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.versions import HANDSHAKE

MAGIC = b"EMXF"
FIXED = struct.Struct("!4sHHIQ")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADER_BYTES, MAX_BYTES = 4096, 64 << 20
"""Largest msgpack header and, unless configured, largest payload."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_SLOTS = 1 << 10
ECHO_BYTES = 1 << 12
"""Bytes that go there and back to prove a connection or a lane."""


class Kind(IntEnum):
    """The kinds of frames: of a handshake, calls, lanes, weights and shared memory."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    ALIVE = 6
    ECHO = 7
    DISPATCH = 8
    ANSWER = 9
    FAILED = 10
    LEAVING = 11
    LANE = 12
    FETCH = 13
    WEIGHTS = 14
    SHARE_REQUEST = 30
    SHARE_REPLY = 31
    SHARED_STEP = 32
    SHARED_STOP = 33


_KINDS = frozenset(int(kind) for kind in Kind)


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base class of messages: the content of a frame's msgpack header."""


class Dispatch(Message, frozen=True, kw_only=True):
    """A call. Payload: ``ids_RK`` int32, ``weights_RK`` float32 if ``reduced``, ``x_RD`` unless by the ``lane``.

    A ``reduced`` answer has one row per row, the weighted sum over its slots; otherwise it has one unweighted row per
    pair, row by row and slot by slot. ``epoch``, ``step``, ``layer`` and ``micro_batch`` only name the call, which may
    be computed again without harm.
    """

    call: int
    epoch: int
    step: int
    layer: int
    micro_batch: int
    rows: int
    slots: int
    reduced: bool
    lane: bool = False


class TracedDispatch(Dispatch, frozen=True, kw_only=True):
    """A call of a step that is traced: ``trace`` is the context of the exchange's span
    (:meth:`services.runtime.tracing.TraceContext.packed`). A release that knows no such field skips it."""

    trace: bytes = b""


class Answer(Message, frozen=True, kw_only=True):
    """The answer to a call. Payload: ``rows`` rows of D elements, unless they go by the ``lane``, as the call did."""

    call: int
    rows: int
    dtype: str
    lane: bool = False


class Failed(Message, frozen=True, kw_only=True):
    """Says that a call failed; ``code`` belongs to a class derived from :class:`services.errors.FabricError`."""

    call: int
    code: str
    message: str


class Echo(Message, frozen=True, kw_only=True):
    """Asks an expert worker to send the payload back, any bytes with this CRC-32."""

    crc: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest lengths, in bytes, that a frame may announce."""

    header: int
    payload: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as it was received; ``payload`` is uint8, in memory of its own."""

    kind: Kind
    header: bytes
    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the frame on the connection."""
        return FIXED.size + len(self.header) + len(self.payload)


M = TypeVar("M", bound=msgspec.Struct)


def message_of(frame: Frame, message: type[M]) -> M:
    """Decode the header of ``frame`` as ``message``. Raises WireError where it is none."""
    return decoded(frame.header, message, f"the header of a {frame.kind.name} frame")


def decoded(data: bytes, struct: type[M], what: str) -> M:
    """Decode ``data`` as ``struct``; ``what`` names it in errors. Raises WireError where it is none."""
    try:
        return msgspec.msgpack.decode(data, type=struct)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"A peer sent {what} that cannot be read: {error}.") from error


def frame_parts(
    kind: Kind, message: Message | None = None, tensors: Sequence[Tensor] = (), *, version: int = HANDSHAKE
) -> list[memoryview]:
    """Return a frame as buffers to send. CPU ``tensors`` are not copied: they must not change until they are sent."""
    header = b"" if message is None else msgspec.msgpack.encode(message)
    payload = [bytes_of(tensor) for tensor in tensors]
    fixed = FIXED.pack(MAGIC, version, kind, len(header), sum(map(len, payload)))
    return [memoryview(fixed + header), *payload]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def read_frame(stream: Stream, limits: Limits, until: float | None = None, *, version: int = HANDSHAKE) -> Frame:
    """Read the next frame.

    Args:
        until: time of the monotonic clock by which the frame must be complete.
        version: the connection's version of the protocol.

    Raises:
        WireError: the bytes are no frame, its kind is unknown or it is larger than ``limits``.
        ProtocolMismatch: the frame has another version.
        SeatLost: see :meth:`Stream.recv_into`; or ``until`` has passed, though bytes still come.
    """
    if until is not None and time.monotonic() >= until:
        raise SeatLost(f"{stream.name} took too long.")
    fixed = bytearray(FIXED.size)
    stream.recv_into(memoryview(fixed), until)
    kind, header_bytes, payload_bytes = _checked(fixed, limits, stream.name, version)
    header = bytearray(header_bytes)
    stream.recv_into(memoryview(header), until)
    payload = torch.empty(payload_bytes, dtype=torch.uint8)
    stream.recv_into(payload.numpy().data, until)
    return Frame(kind, bytes(header), payload)


def _checked(fixed: bytearray, limits: Limits, name: str, version: int) -> tuple[Kind, int, int]:
    magic, sent, kind, header_bytes, payload_bytes = FIXED.unpack(fixed)
    if magic != MAGIC:
        raise WireError(
            f"{name} does not speak the fabric's protocol.", hint="Check the address and TLS on both sides."
        )
    if sent != version:
        raise ProtocolMismatch(f"{name} sent a frame of version {sent} of the fabric's protocol instead of {version}.")
    if kind not in _KINDS:
        raise WireError(f"{name} sent a frame of the unknown kind {kind}.")
    if header_bytes > limits.header or payload_bytes > limits.payload:
        raise WireError(
            f"{name} announced a frame of {header_bytes} + {payload_bytes} bytes; "
            f"at most {limits.header} + {limits.payload} are allowed here."
        )
    return Kind(kind), header_bytes, payload_bytes


def unpack_dispatch(
    frame: Frame, call: Dispatch, hidden: int, dtype: torch.dtype, x_RD: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x_RD``, ``ids_RK`` int32 and ``weights_RK`` float32 (ones unless reduced) as views of the payload.

    Args:
        x_RD: the rows, where they came over a lane.

    Raises:
        WireError: the payload has another length than the message implies.
    """
    if call.rows < 1 or not 1 <= call.slots <= MAX_SLOTS:
        raise WireError(f"A call has {call.rows} rows of {call.slots} slots.")
    pairs = call.rows * call.slots
    ends = [pairs * 4, pairs * (8 if call.reduced else 4)]
    ends.append(ends[1] + (call.rows * hidden * dtype.itemsize if x_RD is None else 0))
    if ends[2] != len(frame.payload):
        raise WireError(f"A call of {call.rows} rows has {len(frame.payload)} bytes instead of {ends[2]}.")
    ids_RK = frame.payload[: ends[0]].view(torch.int32).view(call.rows, call.slots)
    weights = frame.payload[ends[0] : ends[1]].view(torch.float32) if call.reduced else torch.ones(pairs)
    if x_RD is None:
        x_RD = frame.payload[ends[1] :].view(dtype).view(call.rows, hidden)
    return x_RD, ids_RK, weights.view(call.rows, call.slots)
