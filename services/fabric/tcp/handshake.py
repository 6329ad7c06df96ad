"""The handshake of a connection: both sides prove that they know the secret, then that they serve the same model.

    attention -> HELLO      nonce
    experts   -> CHALLENGE  nonce
    attention -> PROOF      its facts, HMAC-SHA256(secret, "attention", both nonces, facts)
    experts   -> WELCOME    its facts, HMAC-SHA256(secret, "experts", both nonces, both sides' facts)

Either side may answer REFUSED with the reason, which the other side raises too. The secret never crosses the wire. The
facts name the versions that a side speaks; later frames are of the highest common version, which nobody between can
lower. Later frames are neither encrypted nor signed: over a network that is not trusted give both sides TLS.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from services.errors import (
    ConfigError,
    ExpertMeshError,
    FabricError,
    FingerprintMismatch,
    ProtocolMismatch,
    SeatFull,
    SeatLeaving,
    SecretMismatch,
    WireError,
)
from services.fabric.tcp.frames import DTYPES, Kind, Limits, Message, decoded, frame_parts, message_of, read_frame
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.versions import HANDSHAKE, SPOKEN, Versions
from services.wire import differ_in_format, format_of

HANDSHAKE_LIMITS = Limits(header=4096, payload=0)
_NONCE_BYTES = 32
_DRAIN_S = 1.0
_REFUSALS: dict[str, type[ExpertMeshError]] = {
    error.code: error
    for error in (FingerprintMismatch, ProtocolMismatch, SecretMismatch, SeatFull, SeatLeaving, WireError)
}


class Hello(Message, frozen=True, kw_only=True):
    """Facts about one side. Every release reads this message, so that fields are only added, at its end.

    ``worker`` is an incarnation; ``max_rows`` and ``max_bytes`` are the largest call that it takes. ``lane`` is the
    kind of lane that it offers, if any, on the GPU with the UUID ``device``. The handshake fills in the versions from
    ``oldest`` to ``newest`` that it speaks; a release that sends neither speaks version 1. ``batch_invariant``: it
    computes a row the same way whatever others there are; both sides must, or neither.
    """

    fingerprint: str
    worker: str
    hidden: int
    dtype: str
    seat: int = -1
    package: str = ""
    max_rows: int = 0
    max_bytes: int = 0
    lane: str = ""
    device: str = ""
    oldest: int = 1
    newest: int = 1
    weights: str = ""
    batch_invariant: bool = False

    @property
    def versions(self) -> Versions:
        return Versions(self.oldest, self.newest)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of a handshake: the other side's facts, and the version of all later frames."""

    theirs: Hello
    version: int


class Nonce(Message, frozen=True, kw_only=True):
    """Random bytes of one side: the content of HELLO and CHALLENGE."""

    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class Proof(Message, frozen=True, kw_only=True):
    """An encoded :class:`Hello` and its HMAC: the content of PROOF and WELCOME."""

    hello: bytes
    proof: bytes


class Refused(Message, frozen=True, kw_only=True):
    """The code and message of the error by which a side refuses the other one."""

    code: str
    message: str


M = TypeVar("M", bound=Message)


def check_facts(hello: Hello, secret: bytes) -> None:
    """Raise ConfigError where a side cannot start: the secret is empty, or the fabric does not carry the dtype."""
    if not secret:
        raise ConfigError("The fabric's secret is empty.", hint="Give all workers of a cluster the same random secret.")
    if hello.dtype not in DTYPES:
        raise ConfigError(f"The fabric carries no {hello.dtype}.", hint=f"Choose one of {', '.join(DTYPES)}.")


def greet(stream: Stream, secret: bytes, mine: Hello, until: float, *, spoken: Versions = SPOKEN) -> Agreed:
    """Do the attention side's part of the handshake.

    Raises:
        SecretMismatch, FingerprintMismatch, ProtocolMismatch, SeatFull, SeatLeaving: one side refuses the other.
        SeatLost: no answer came by ``until``, a time of the monotonic clock.
        WireError: the other side does not follow the protocol.
    """
    mine = _speaking(mine, spoken)
    with _refusing(stream, until):
        nonce, signed = os.urandom(_NONCE_BYTES), msgspec.msgpack.encode(mine)
        stream.send(frame_parts(Kind.HELLO, Nonce(nonce=nonce)), until)
        nonces = nonce + _read(stream, Kind.CHALLENGE, Nonce, until).nonce
        proof = _sign(secret, b"attention", nonces, signed)
        stream.send(frame_parts(Kind.PROOF, Proof(hello=signed, proof=proof)), until)
        welcome = _read(stream, Kind.WELCOME, Proof, until)
        _verify(welcome.proof, _sign(secret, b"experts", nonces, signed, welcome.hello), stream.name)
        return _agreed(mine, welcome.hello, stream.name)


def admit(
    stream: Stream,
    secret: bytes,
    mine: Hello,
    until: float,
    *,
    spoken: Versions = SPOKEN,
    proven: Callable[[], None] = lambda: None,
) -> Agreed:
    """Do the expert side's part of the handshake. It raises the errors of :func:`greet`.

    Args:
        proven: called once the other side has proven itself and fits; its errors refuse the other side.
    """
    mine = _speaking(mine, spoken)
    with _refusing(stream, until):
        nonces = _read(stream, Kind.HELLO, Nonce, until).nonce
        nonce, signed = os.urandom(_NONCE_BYTES), msgspec.msgpack.encode(mine)
        nonces += nonce
        stream.send(frame_parts(Kind.CHALLENGE, Nonce(nonce=nonce)), until)
        proof = _read(stream, Kind.PROOF, Proof, until)
        _verify(proof.proof, _sign(secret, b"attention", nonces, proof.hello), stream.name)
        agreed = _agreed(mine, proof.hello, stream.name)
        proven()
        answer = _sign(secret, b"experts", nonces, proof.hello, signed)
        stream.send(frame_parts(Kind.WELCOME, Proof(hello=signed, proof=answer)), until)
        return agreed


@contextmanager
def _refusing(stream: Stream, until: float) -> Iterator[None]:
    """Send the other side the error that refuses it, unless the other side has refused."""
    try:
        yield
    except (FabricError, FingerprintMismatch) as error:
        if error.code in _REFUSALS and not isinstance(error.__cause__, _RefusedByPeer):
            with suppress(FabricError):
                stream.send(frame_parts(Kind.REFUSED, Refused(code=error.code, message=error.message[:1000])), until)
            stream.drain(min(until, time.monotonic() + _DRAIN_S))
        raise


class _RefusedByPeer(Exception):
    pass


def refusal(message: Refused, name: str) -> ExpertMeshError:
    """Return the error by which ``name`` refused this side."""
    return _REFUSALS.get(message.code, FabricError)(f"{name} refused: {message.message}")


def _read(stream: Stream, kind: Kind, message: type[M], until: float) -> M:
    frame = read_frame(stream, HANDSHAKE_LIMITS, until)
    if frame.kind == Kind.REFUSED:
        raise refusal(message_of(frame, Refused), stream.name) from _RefusedByPeer()
    if frame.kind != kind:
        raise WireError(f"{stream.name} sent {frame.kind.name} instead of {kind.name}.")
    return message_of(frame, message)


def _sign(secret: bytes, role: bytes, nonces: bytes, *hellos: bytes) -> bytes:
    parts = [role, HANDSHAKE.to_bytes(2, "big"), nonces, *hellos]
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _verify(proof: bytes, expected: bytes, name: str) -> None:
    if not hmac.compare_digest(proof, expected):
        raise SecretMismatch(f"{name} does not know this cluster's secret.", hint="Give both sides the same one.")


def _speaking(mine: Hello, spoken: Versions) -> Hello:
    return msgspec.structs.replace(mine, oldest=spoken.oldest, newest=spoken.newest)


def _agreed(mine: Hello, signed: bytes, name: str) -> Agreed:
    theirs = decoded(signed, Hello, "facts")
    version = mine.versions.common(theirs.versions)
    if version is None:
        raise ProtocolMismatch(
            f"{name} (release {theirs.package or 'unknown'}) speaks {theirs.versions} of the fabric's protocol, "
            f"and this worker (release {mine.package or 'unknown'}) {mine.versions}.",
            hint="Upgrade through a release that speaks to both.",
        )
    _check_model(mine, theirs, name)
    return Agreed(theirs, version)


def _check_model(mine: Hello, theirs: Hello, name: str) -> None:
    if theirs.fingerprint != mine.fingerprint:
        raise FingerprintMismatch(
            f"{name} (worker {theirs.worker!r}) serves the model {theirs.fingerprint!r}, not {mine.fingerprint!r}.",
            hint="Start attention and expert workers from the same model folder.",
        )
    if differ_in_format(mine.weights, theirs.weights):
        raise FingerprintMismatch(
            f"{name} (worker {theirs.worker!r}) is for experts held in {format_of(theirs.weights)}, this worker "
            f"({mine.worker!r}) for experts held in {format_of(mine.weights)}.",
            hint="Start attention and expert workers with the same --expert-format and --dense-format.",
        )
    if mine.weights and theirs.weights and theirs.weights != mine.weights:
        raise FingerprintMismatch(
            f"{name} (worker {theirs.worker!r}) serves different weights of the same shape: {theirs.weights!r} there, "
            f"{mine.weights!r} here.",
            hint="Start attention and expert workers from the same model folder.",
        )
    if (theirs.hidden, theirs.dtype) != (mine.hidden, mine.dtype):
        raise ProtocolMismatch(
            f"{name} has rows of {theirs.hidden} x {theirs.dtype}, not of {mine.hidden} x {mine.dtype}.",
            hint="Start attention and expert workers with the same --dtype.",
        )
    if theirs.batch_invariant != mine.batch_invariant:
        with_it, without = (mine, theirs) if mine.batch_invariant else (theirs, mine)
        raise ProtocolMismatch(
            f"{name}: worker {with_it.worker!r} computes batch-invariantly, and worker {without.worker!r} does not.",
            hint="Start attention and expert workers both with --batch-invariant, or both without.",
        )
