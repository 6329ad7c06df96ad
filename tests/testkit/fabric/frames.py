"""A valid frame of every kind on the fabric, and bytes that are nearly one."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from services.fabric.nccl.messages import Fetch, LaneNote, Weights
from services.fabric.shared_memory import messages as sharing
from services.fabric.shared_memory.memory import MemoryHandle
from services.fabric.tcp.frames import FIXED, MAGIC, Answer, Dispatch, Echo, Failed, Kind, Message, frame_parts
from services.fabric.tcp.handshake import Nonce, Proof, Refused
from services.fabric.tcp.versions import HANDSHAKE
from testkit.fabric.tcp import hello

IDS_RK = torch.tensor([[1, -1], [0, 2]], dtype=torch.int32)
HANDLE = MemoryHandle(kind="host", server="nowhere", key=b"k" * 16, size=4096, nonce_at=4000, nonce=b"n" * 32)
NONCE = Nonce(nonce=b"n" * 32)
PROOF = Proof(hello=msgspec.msgpack.encode(hello()), proof=b"p" * 32)
CALL = Dispatch(call=1, epoch=2, step=3, layer=0, micro_batch=5, rows=2, slots=2, reduced=False)
ANSWER = Answer(call=1, rows=2, dtype="float32")
STEP = sharing.Step(epoch=1, step=2, base=3, bucket=8, micro_batches=1, deadline_s=0.5, whole=True)
SHARED = msgspec.msgpack.encode(HANDLE)
SAMPLES: list[tuple[Kind, Message | None, list[Tensor]]] = [
    (Kind.HELLO, NONCE, []),
    (Kind.CHALLENGE, NONCE, []),
    (Kind.PROOF, PROOF, []),
    (Kind.WELCOME, PROOF, []),
    (Kind.REFUSED, Refused(code="seat_leaving", message="m"), []),
    (Kind.ALIVE, None, []),
    (Kind.ECHO, Echo(crc=7), [torch.ones(9)]),
    (Kind.DISPATCH, CALL, [IDS_RK, torch.ones(2, 4)]),
    (Kind.DISPATCH, replace(CALL, call=2, reduced=True, lane=True), [IDS_RK, torch.ones(2, 2)]),
    (Kind.ANSWER, replace(ANSWER, lane=True), []),
    (Kind.ANSWER, ANSWER, [torch.ones(2, 4)]),
    (Kind.FAILED, Failed(call=1, code="call_failed", message="m"), []),
    (Kind.LEAVING, None, []),
    (Kind.LANE, LaneNote(key="", value=b"", problem="p"), []),
    (Kind.FETCH, Fetch(layer=0), [torch.tensor([0, 2], dtype=torch.int32)]),
    (Kind.WEIGHTS, Weights(layer=0, name="down", shape=(2, 3), checksum=1 << 63), []),
    (Kind.SHARE_REQUEST, sharing.ShareRequest(handle=SHARED, rows=8, slots=2, micro_batches=1, unsummed=True), []),
    (Kind.SHARE_REPLY, sharing.ShareReply(handle=SHARED, place=1), []),
    (Kind.SHARED_STEP, STEP, []),
    (Kind.SHARED_STOP, sharing.Stop(), []),
]
FRAMES = [b"".join(frame_parts(*sample)) for sample in SAMPLES]
FRAME_OF = {sample[0]: frame for sample, frame in zip(SAMPLES, FRAMES, strict=True)}
MESSAGES = [hello(), HANDLE, *(message for _, message, _ in SAMPLES if message is not None)]


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """``valid`` with some bytes changed, cut off, put in, or as it is."""
    data = bytearray(valid)
    for place, change in draw(st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(1, 255)), max_size=4)):
        data[place] ^= change
    at = draw(st.integers(0, len(data)))
    put_in = draw(st.binary(max_size=8))
    return bytes(data[:at] + put_in + data[at:])[: draw(st.integers(0, len(data) + 8))]


def framed(kind: int, header: bytes, payload: bytes = b"") -> bytes:
    """A frame whose sizes are right, whatever it holds."""
    return FIXED.pack(MAGIC, HANDSHAKE, kind, len(header), len(payload)) + header + payload


def nearly_frames() -> st.SearchStrategy[bytes]:
    """A few frames one after the other, each perhaps damaged, or made of noise; or noise."""
    noise = st.binary(max_size=200)
    frame = st.one_of(
        st.sampled_from(FRAMES),
        st.sampled_from(FRAMES).flatmap(mutated),
        st.builds(framed, st.sampled_from(Kind), noise, noise),
    )
    return st.lists(frame, min_size=1, max_size=3).map(b"".join) | noise


def nearly_messages(message: msgspec.Struct) -> st.SearchStrategy[bytes]:
    """What a decoder of its kind may be given."""
    deep = st.integers(1, 4000).map(lambda depth: b"\xdc\x00\x20" + b"\x91" * depth + b"\xc0")
    return st.one_of(mutated(msgspec.msgpack.encode(message)), st.binary(max_size=300), deep)
