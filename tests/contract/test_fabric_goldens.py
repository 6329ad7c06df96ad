"""The fabric's bytes, as release 2d85cd8 made them: this one reads each, and makes the same."""

from __future__ import annotations

import msgspec
import pytest
import torch
from testkit.fabric.tcp import pair
from torch import Tensor

from services.fabric.lockstep.rendezvous import Facts
from services.fabric.nccl.messages import Fetch, LaneNote, TypedWeights, Weights
from services.fabric.shared_memory import memory as shared_memory
from services.fabric.shared_memory import messages as sharing
from services.fabric.shared_memory.memory import MemoryHandle
from services.fabric.tcp import frames as tcp_wire
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import Kind, Limits, Message, frame_parts, message_of, read_frame
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.versions import Versions

NONCE = bytes(range(32))
SECRET = b"secret"
FRAMES = {
    Kind.HELLO: (
        "454d58460001000100000023000000000000000091c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    ),
    Kind.CHALLENGE: (
        "454d58460001000200000023000000000000000091c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    ),
    Kind.PROOF: (
        "454d5846000100030000004a000000000000000092c4259aa166a17704a862666c6f6174313602a5302e312e300506a66e63"
        "636c2f32a54750552d31c420e81490a569b325dce84033201506178ab27b1c53c49d3ba5aef2cd94ab0d2e57"
    ),
    Kind.WELCOME: (
        "454d5846000100040000004a000000000000000092c4259aa166a17704a862666c6f6174313602a5302e312e300506a66e63"
        "636c2f32a54750552d31c42055a1a630a8745e5ab4ae9096365129fe9f3925734770993bc44cfc2c57ab5998"
    ),
    Kind.REFUSED: "454d58460001000500000013000000000000000092af7365637265745f6d69736d61746368a16d",
    Kind.ALIVE: "454d584600010006000000000000000000000000",
    Kind.ECHO: "454d58460001000700000002000000000000000291070102",
    Kind.DISPATCH: (
        "454d5846000100080000000a00000000000000189901020304050102c3c201000000ffffffff0000003f000000400000803f00000040"
    ),
    Kind.ANSWER: "454d5846000100090000000c0000000000000008940101a7666c6f61743332c20000803f00000040",
    Kind.FAILED: "454d58460001000a0000001000000000000000009301ab63616c6c5f6661696c6564a16d",
    Kind.LEAVING: "454d58460001000b000000000000000000000000",
    Kind.LANE: "454d58460001000c0000000e000000000000000093a7666f7274682f78c40176a170",
    Kind.FETCH: "454d58460001000d00000002000000000000000891030000000002000000",
    Kind.WEIGHTS: "454d58460001000e0000001300000000000000009403a4646f776e920203cf8000000000000000",
    Kind.SHARE_REQUEST: "454d58460001001e00000008000000000000000095c40174080202c3",
    Kind.SHARE_REPLY: "454d58460001001f00000008000000000000000094c4017401c3a170",
    Kind.SHARED_STEP: "454d584600010020000000100000000000000000970102030801cb3fe0000000000000c3",
    Kind.SHARED_STOP: "454d58460001002100000001000000000000000090",
}
FACTS = "9aa166a17704a862666c6f6174313602a5302e312e300506a66e63636c2f32a54750552d31"
HANDLE = "98a4686f7374a170c4016b4020c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa16403"
RANK = b'{"worker":"w","node":"n","fingerprint":"f","package":"0.1.0","dtype":"float32","exchange":"e"}'

HELLO = Hello(
    fingerprint="f", worker="w", hidden=4, dtype="bfloat16", seat=2, package="0.1.0", max_rows=5, max_bytes=6,
    lane="nccl/2", device="GPU-1",
)  # fmt: skip
IDS_RK, WEIGHTS_RK = torch.tensor([[1, -1]], dtype=torch.int32), torch.tensor([[0.5, 2.0]])
X_RD = torch.tensor([[1.0, 2.0]])


def proof(role: bytes, facts: int) -> tcp_handshake.Proof:
    signed = [bytes.fromhex(FACTS)] * facts
    return tcp_handshake.Proof(hello=signed[0], proof=tcp_handshake._sign(SECRET, role, NONCE + NONCE, *signed))


MESSAGES: dict[Kind, tuple[Message | None, list[Tensor]]] = {
    Kind.HELLO: (tcp_handshake.Nonce(nonce=NONCE), []),
    Kind.CHALLENGE: (tcp_handshake.Nonce(nonce=NONCE), []),
    Kind.PROOF: (proof(b"attention", 1), []),
    Kind.WELCOME: (proof(b"experts", 2), []),
    Kind.REFUSED: (tcp_handshake.Refused(code="secret_mismatch", message="m"), []),
    Kind.ALIVE: (None, []),
    Kind.ECHO: (tcp_wire.Echo(crc=7), [torch.tensor([1, 2], dtype=torch.uint8)]),
    Kind.DISPATCH: (
        tcp_wire.Dispatch(call=1, epoch=2, step=3, layer=4, micro_batch=5, rows=1, slots=2, reduced=True),
        [IDS_RK, WEIGHTS_RK, X_RD],
    ),
    Kind.ANSWER: (tcp_wire.Answer(call=1, rows=1, dtype="float32"), [X_RD]),
    Kind.FAILED: (tcp_wire.Failed(call=1, code="call_failed", message="m"), []),
    Kind.LEAVING: (None, []),
    Kind.LANE: (LaneNote(key="forth/x", value=b"v", problem="p"), []),
    Kind.FETCH: (Fetch(layer=3), [torch.tensor([0, 2], dtype=torch.int32)]),
    Kind.WEIGHTS: (Weights(layer=3, name="down", shape=(2, 3), checksum=1 << 63), []),
    Kind.SHARE_REQUEST: (sharing.ShareRequest(handle=b"t", rows=8, slots=2, micro_batches=2, unsummed=True), []),
    Kind.SHARE_REPLY: (sharing.ShareReply(handle=b"t", place=1, colocated=True, problem="p"), []),
    Kind.SHARED_STEP: (
        sharing.Step(epoch=1, step=2, base=3, bucket=8, micro_batches=1, deadline_s=0.5, whole=True),
        [],
    ),
    Kind.SHARED_STOP: (sharing.Stop(), []),
}


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_frames_of_the_last_release_are_read_and_made(kind: Kind) -> None:
    message, tensors = MESSAGES[kind]
    assert b"".join(frame_parts(kind, message, tensors)).hex() == FRAMES[kind]
    with pair() as (near, far):
        near.send([memoryview(bytes.fromhex(FRAMES[kind]))])
        frame = read_frame(far, Limits(4096, 4096))
    assert frame.kind == kind
    assert message is None or message_of(frame, type(message)) == message
    assert bytes(frame.payload) == b"".join(map(bytes, map(tcp_wire.bytes_of, tensors)))


def test_a_part_of_a_quantised_weight_says_its_type_behind_what_the_last_release_reads() -> None:
    dense = Weights(layer=3, name="down", shape=(2, 3), checksum=1 << 63)
    part = TypedWeights(layer=3, name="down.packed", shape=(2, 3), checksum=5, dtype="uint8")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(part)) == [3, "down.packed", [2, 3], 5, "uint8"]
    read = tcp_wire.decoded(msgspec.msgpack.encode(dense), TypedWeights, "weights")
    assert (read.name, read.shape, read.dtype) == ("down", (2, 3), "")


def test_facts_of_the_last_release_name_no_versions_and_mean_the_first() -> None:
    theirs = tcp_wire.decoded(bytes.fromhex(FACTS), Hello, "facts")
    assert theirs == HELLO
    assert theirs.versions == Versions(1, 1)


def test_the_last_release_reads_the_facts_of_this_one() -> None:
    """An array of msgpack: it takes the first ten, and reads no more than that."""
    mine = msgspec.msgpack.decode(msgspec.msgpack.encode(HELLO))
    assert mine[:10] == msgspec.msgpack.decode(bytes.fromhex(FACTS))
    assert mine[10:] == [1, 1, "", False]


def test_handles_and_ranks_of_the_last_release_are_read() -> None:
    handle = shared_memory.decode_handle(bytes.fromhex(HANDLE), "host")
    assert msgspec.msgpack.encode(handle).hex() == HANDLE
    assert handle == MemoryHandle(
        kind="host", server="p", key=b"k", size=64, nonce_at=32, nonce=NONCE, device="d", process=3
    )  # fmt: skip
    facts = Facts(worker="w", node="n", fingerprint="f", package="0.1.0", dtype="float32", exchange="e")
    assert msgspec.json.decode(RANK, type=Facts) == facts
    assert msgspec.json.decode(msgspec.json.encode(facts)).items() >= msgspec.json.decode(RANK).items()
