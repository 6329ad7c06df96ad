"""How the ranks of a group find one another: at rank 0's store, each under its number, all with the same facts.

One store lives for one group. A rank that comes again while the old group stands finds its number taken: it spoils
that store and rings, so that the others notice, end, and all meet anew at the next store.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from services.errors import (
    ConfigError,
    FabricError,
    FingerprintMismatch,
    LockstepBroken,
    PortInUse,
    ProtocolMismatch,
    SecretMismatch,
)
from services.fabric.faults import Faults
from services.fabric.lockstep.gloo import Group, gloo_group, guarded
from services.fabric.lockstep.store_proxy import LOOPBACK, ClientProxy, ServerProxy
from services.fabric.lockstep.turns import StoreWakeUp, notify_all

WIRE = 1
LOOK_S = 0.5
NOTE_S = 15.0
INVALIDATED = "spoiled"
_ALIKE = "Give all ranks the same version and options."

log = logging.getLogger(__name__)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself. All but ``worker`` and ``node`` have to be the same everywhere.

    Every release reads it: new fields have a default. ``wire``: version of what ranks send each other once they have
    met; ranks start together, so there is but one.
    """

    worker: str
    node: str
    fingerprint: str
    package: str
    dtype: str
    exchange: str
    """How experts are shared and rows exchanged, as text."""
    wire: int = WIRE


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where and as whom. ``host`` is the own address, as the others reach it; ``address`` and ``port`` are rank 0's.

    ``secret``: the one that all ranks share.
    """

    rank: int
    ranks: int
    address: str
    port: int
    host: str
    timeout_s: float
    secret: bytes


class Joined:
    """All ranks are there.

    Attributes:
        nodes: by rank.
    """

    def __init__(self, meeting: Meeting, found: _Found, facts: Sequence[Facts]) -> None:
        self._meeting, self._found, self._store = meeting, found, found.store
        self.nodes = tuple(fact.node for fact in facts)

    def group(self, name: str = "data") -> Group:
        """Raises LockstepBroken."""
        meeting = self._meeting
        store = PrefixStore(name, self._store)
        return gloo_group(store, meeting.rank, meeting.ranks, host=meeting.host, timeout_s=meeting.timeout_s)

    def store(self, name: str) -> PrefixStore:
        return PrefixStore(name, self._store)

    def wake_up(self, on_notify: Callable[[], None]) -> StoreWakeUp:
        meeting = self._meeting
        with guarded("connecting to the ranks' store"):
            waits = TCPStore(LOOPBACK, self._found.port, is_master=False, wait_for_workers=False)
        return StoreWakeUp(self._store, waits, keeper=meeting.rank == 0, on_notify=on_notify)


def join(meeting: Meeting, facts: Facts, faults: Faults | None = None) -> Joined:
    """Waits until all ranks are there, however long that takes.

    Args:
        faults: counts whom rank 0 does not let in.

    Raises:
        ConfigError: rank 0's address cannot be listened on.
        FingerprintMismatch, ConfigError: another rank has another checkpoint, version or options; says which.
        SecretMismatch, ProtocolMismatch: rank 0 has another secret, or speaks no version that this release does.
        LockstepBroken: a rank came twice or says what cannot be read, or rank 0 went: start again.
    """
    mine = msgspec.json.encode(facts).decode()
    found = _store(meeting, facts.package, faults)
    while not _claimed(found.store, meeting.rank, mine):
        found.door.close()
        found = _store(meeting, facts.package, faults)
    with guarded("meeting the other ranks"):
        _wait_for_all(found.store, meeting.ranks)
        told = [_told(rank, found.store.get(_key(rank))) for rank in range(meeting.ranks)]
    for rank, other in enumerate(told):
        _compare(rank, other, facts)
    return Joined(meeting, found, told)


@dataclass(frozen=True, slots=True)
class _Found:
    """A store, where on loopback it is reached, and the door that keeps that open."""

    store: TCPStore
    port: int
    door: ServerProxy | ClientProxy


def _store(meeting: Meeting, package: str = "", faults: Faults | None = None) -> _Found:
    """Rank 0 keeps it; the others wait until it is there.

    Raises:
        SecretMismatch, ProtocolMismatch: as :func:`join` says.
    """
    if meeting.rank == 0:
        outside, inside = _listener(meeting), socket.create_server((LOOPBACK, 0))
        port: int = inside.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=inside.detach())
        gate = ServerProxy(outside, secret=meeting.secret, port=port, name="rank 0", package=package, faults=faults)
        return _Found(store, port, gate)
    noted = time.monotonic()
    while True:
        try:
            name = f"rank {meeting.rank}"
            return _through(
                ClientProxy(meeting.address, meeting.port, secret=meeting.secret, name=name, package=package)
            )
        except (SecretMismatch, ProtocolMismatch):
            raise
        except (RuntimeError, OSError, FabricError):  # nobody listens there yet
            if time.monotonic() - noted > NOTE_S:
                log.info("rank %d waits for rank 0 at %s:%d", meeting.rank, meeting.address, meeting.port)
                noted = time.monotonic()
            time.sleep(LOOK_S)


def _through(tunnel: ClientProxy) -> _Found:
    try:
        wait = timedelta(seconds=NOTE_S)
        store = TCPStore(LOOPBACK, tunnel.port, is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError:
        tunnel.close()
        raise
    return _Found(store, tunnel.port, tunnel)


def _listener(meeting: Meeting) -> socket.socket:
    """Of that address alone, not of all."""
    try:
        family = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((meeting.address, meeting.port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Another process listens on {meeting.address}:{meeting.port}.",
                hint="Choose another --lockstep-address.",
            ) from error
        raise ConfigError(
            f"Rank 0 cannot listen on {meeting.address}:{meeting.port}: {error}.",
            hint="Choose another --lockstep-address.",
        ) from error


def _claimed(store: TCPStore, rank: int, mine: str) -> bool:
    """Whether ``rank`` is ours at this store. If not, the store is invalidated, and gone when this returns."""
    try:
        if store.compare_set(_key(rank), "", mine).decode() == mine:
            return True
        log.info("rank %d is taken in the old group; waiting for its end", rank)
        store.set(INVALIDATED, str(rank))
        notify_all(store)
        while True:
            store.check([INVALIDATED])
            time.sleep(LOOK_S / 10)
    except RuntimeError:
        return False


def _wait_for_all(store: TCPStore, ranks: int) -> None:
    noted = time.monotonic()
    while missing := [rank for rank in range(ranks) if not store.check([_key(rank)])]:
        if store.check([INVALIDATED]):
            twice = store.get(INVALIDATED).decode(errors="replace")
            raise LockstepBroken(f"Rank {twice} came twice.", hint="All ranks start again.")
        if time.monotonic() - noted > NOTE_S:
            log.info("waiting for rank %s", ", ".join(map(str, missing)))
            noted = time.monotonic()
        time.sleep(LOOK_S / 10)


def _compare(rank: int, other: Facts, mine: Facts) -> None:
    if other.fingerprint != mine.fingerprint:
        raise FingerprintMismatch(
            f"Rank {rank} serves another checkpoint: {other.fingerprint} there, {mine.fingerprint} here.",
            hint="Give all ranks the same --model.",
        )
    for name in ("package", "wire", "dtype", "exchange"):
        if getattr(other, name) != getattr(mine, name):
            raise ConfigError(
                f"Rank {rank} differs in its {name}: {getattr(other, name)} there, {getattr(mine, name)} here.",
                hint=_ALIKE,
            )


def _told(rank: int, data: bytes) -> Facts:
    try:
        return msgspec.json.decode(data, type=Facts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LockstepBroken(f"Rank {rank} says of itself what cannot be read: {error}.", hint=_ALIKE) from error


def _key(rank: int) -> str:
    return f"rank/{rank}"
