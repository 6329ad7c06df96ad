"""A valid frame of every kind on the fabric, and bytes that are nearly one."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from hypothesis import strategies as st

from services.fabric.nccl.messages import Fetch, LaneNote, Weights
from services.fabric.shared_memory import messages as sharing
from services.fabric.shared_memory.memory import MemoryHandle
from services.fabric.tcp import frames as tcp_wire
from services.fabric.tcp.frames import Kind, frame_parts
from services.fabric.tcp.handshake import Nonce, Proof, Refused
from testkit.fabric.tcp import hello

IDS_RK = torch.tensor([[1, -1], [0, 2]], dtype=torch.int32)
HANDLE = MemoryHandle(kind="host", server="nowhere", key=b"k" * 16, size=4096, nonce_at=4000, nonce=b"n" * 32)
NONCE, FACTS = Nonce(nonce=b"n" * 32), msgspec.msgpack.encode(hello())


def _frame(kind: Kind, message: Any = None, tensors: tuple[torch.Tensor, ...] = ()) -> bytes:
    return b"".join(frame_parts(kind, message, tensors))


FRAMES = [
    _frame(Kind.HELLO, NONCE),
    _frame(Kind.CHALLENGE, NONCE),
    _frame(Kind.PROOF, Proof(hello=FACTS, proof=b"p" * 32)),
    _frame(Kind.WELCOME, Proof(hello=FACTS, proof=b"p" * 32)),
    _frame(Kind.REFUSED, Refused(code="seat_leaving", message="m")),
    _frame(Kind.ALIVE),
    _frame(Kind.ECHO, tcp_wire.Echo(crc=7), (torch.ones(9),)),
    _frame(
        Kind.DISPATCH,
        tcp_wire.Dispatch(call=1, epoch=2, step=3, layer=0, micro_batch=5, rows=2, slots=2, reduced=False),
        (IDS_RK, torch.ones(2, 4)),
    ),
    _frame(
        Kind.DISPATCH,
        tcp_wire.Dispatch(call=2, epoch=2, step=3, layer=0, micro_batch=5, rows=2, slots=2, reduced=True, lane=True),
        (IDS_RK, torch.ones(2, 2)),
    ),
    _frame(Kind.ANSWER, tcp_wire.Answer(call=1, rows=2, dtype="float32"), (torch.ones(2, 4),)),
    _frame(Kind.ANSWER, tcp_wire.Answer(call=1, rows=2, dtype="float32", lane=True)),
    _frame(Kind.FAILED, tcp_wire.Failed(call=1, code="call_failed", message="m")),
    _frame(Kind.LEAVING),
    _frame(Kind.LANE, LaneNote(key="", value=b"", problem="p")),
    _frame(Kind.FETCH, Fetch(layer=0), (torch.tensor([0, 2], dtype=torch.int32),)),
    _frame(Kind.WEIGHTS, Weights(layer=0, name="down", shape=(2, 3), checksum=1 << 63)),
    _frame(
        Kind.SHARE_REQUEST,
        sharing.ShareRequest(handle=msgspec.msgpack.encode(HANDLE), rows=8, slots=2, micro_batches=1, unsummed=True),
    ),
    _frame(Kind.SHARE_REPLY, sharing.ShareReply(handle=msgspec.msgpack.encode(HANDLE), place=1)),
    _frame(
        Kind.SHARED_STEP, sharing.Step(epoch=1, step=2, base=3, bucket=8, micro_batches=1, deadline_s=0.5, whole=True)
    ),
    _frame(Kind.SHARED_STOP, sharing.Stop()),
]


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """``valid`` with some bytes changed, cut off, put in, or as it is."""
    data = bytearray(valid)
    for place, change in draw(st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(1, 255)), max_size=4)):
        data[place] ^= change
    at = draw(st.integers(0, len(data)))
    put_in = draw(st.binary(max_size=8))
    return bytes(data[:at] + put_in + data[at:])[: draw(st.integers(0, len(data) + 8))]


def nearly_frames() -> st.SearchStrategy[bytes]:
    """A few frames one after the other, each perhaps damaged; or noise."""
    damaged = st.sampled_from(FRAMES).flatmap(mutated)
    return st.one_of(st.lists(damaged | st.sampled_from(FRAMES), min_size=1, max_size=3).map(b"".join), st.binary())


def nearly_messages(message: msgspec.Struct) -> st.SearchStrategy[bytes]:
    """What a decoder of its kind may be given."""
    deep = st.integers(1, 4000).map(lambda depth: b"\xdc\x00\x20" + b"\x91" * depth + b"\xc0")
    return st.one_of(mutated(msgspec.msgpack.encode(message)), st.binary(max_size=300), deep)
