"""How the ranks of a lock-step group meet: at rank 0's store, each under its number, all with the same facts.

One store lives for one group. A rank that restarts while the old group runs finds its number taken: it invalidates that
store and sends the wake-up signal, so that the other ranks notice and end, and all meet at the next store.
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
from services.wire import differ_in_format, format_of

WIRE = 1
LOOK_S = 0.5
NOTE_S = 15.0
INVALIDATED = "spoiled"
"""Key in the store that all releases of a group read."""
_ALIKE = "Give all ranks the same version and options."

log = logging.getLogger(__name__)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a rank. All fields but ``worker`` and ``node`` have to be equal in all ranks.

    Every release reads this message, so that new fields have a default. ``exchange`` says how experts are shared and
    rows exchanged. ``wire`` is the version of later messages: ranks start together, so that there is only one.
    """

    worker: str
    node: str
    fingerprint: str
    package: str
    dtype: str
    exchange: str
    wire: int = WIRE
    weights: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The number of a rank and the place where it meets the others: ``address`` and ``port`` are those of rank 0.

    The others reach this rank at ``host``. The ranks connect within ``timeout_s`` and share the secret.
    """

    rank: int
    ranks: int
    address: str
    port: int
    host: str
    timeout_s: float
    secret: bytes


class Joined:
    """A meeting in which all ranks have met; ``nodes`` has the name of the node by rank."""

    def __init__(self, meeting: Meeting, found: _Found, facts: Sequence[Facts]) -> None:
        self._meeting, self._found, self._store = meeting, found, found.store
        self.nodes = tuple(fact.node for fact in facts)

    def group(self, name: str = "data") -> Group:
        """Make a process group of all ranks. Raises LockstepBroken."""
        meeting, store = self._meeting, self.store(name)
        return gloo_group(store, meeting.rank, meeting.ranks, host=meeting.host, timeout_s=meeting.timeout_s)

    def store(self, name: str) -> PrefixStore:
        """Return the part of the ranks' store under ``name``."""
        return PrefixStore(name, self._store)

    def wake_up(self, on_notify: Callable[[], None]) -> StoreWakeUp:
        """Return this rank's wake-up signal. Raises LockstepBroken where the store is gone."""
        meeting = self._meeting
        with guarded("connecting to the ranks' store"):
            waits = TCPStore(LOOPBACK, self._found.port, is_master=False, wait_for_workers=False)
        return StoreWakeUp(self._store, waits, keeper=meeting.rank == 0, on_notify=on_notify)


def join(meeting: Meeting, facts: Facts, faults: Faults | None = None) -> Joined:
    """Wait until all ranks have met, however long that takes.

    Args:
        faults: counts peers that rank 0 refuses.

    Raises:
        ConfigError: rank 0 cannot listen on its address.
        FingerprintMismatch, ConfigError: another rank has another checkpoint, version or options; says which.
        SecretMismatch, ProtocolMismatch: rank 0 has another secret, or speaks no version of this release.
        LockstepBroken: a rank came twice or sent unreadable facts, or rank 0 is gone: start again.
    """
    mine = msgspec.json.encode(facts).decode()
    found = _store(meeting, facts.package, faults)
    while not _claimed(found.store, meeting.rank, mine):
        found.proxy.close()
        found = _store(meeting, facts.package, faults)
    with guarded("meeting the other ranks"):
        _wait_for_all(found.store, meeting.ranks)
        everyone = [_facts_of(rank, found.store.get(_key(rank))) for rank in range(meeting.ranks)]
    for rank, other in enumerate(everyone):
        _compare(rank, other, facts)
    return Joined(meeting, found, everyone)


@dataclass(frozen=True, slots=True)
class _Found:
    """A store, its port on loopback, and the proxy behind that port."""

    store: TCPStore
    port: int
    proxy: ServerProxy | ClientProxy


def _store(meeting: Meeting, package: str = "", faults: Faults | None = None) -> _Found:
    """Start the store in rank 0; wait for it in the other ranks. Raises SecretMismatch, ProtocolMismatch."""
    if meeting.rank == 0:
        outside, inside = _listener(meeting), socket.create_server((LOOPBACK, 0))
        port: int = inside.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=inside.detach())
        proxy = ServerProxy(outside, secret=meeting.secret, port=port, name="rank 0", package=package, faults=faults)
        return _Found(store, port, proxy)
    noted, name = time.monotonic(), f"rank {meeting.rank}"
    while True:
        try:
            return _through(
                ClientProxy(meeting.address, meeting.port, secret=meeting.secret, name=name, package=package)
            )
        except (SecretMismatch, ProtocolMismatch):
            raise
        except (RuntimeError, OSError, FabricError):  # nobody listens there yet
            if time.monotonic() - noted > NOTE_S:
                log.info("rank %d is waiting for rank 0 at %s:%d", meeting.rank, meeting.address, meeting.port)
                noted = time.monotonic()
            time.sleep(LOOK_S)


def _through(proxy: ClientProxy) -> _Found:
    try:
        wait = timedelta(seconds=NOTE_S)
        store = TCPStore(LOOPBACK, proxy.port, is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError:
        proxy.close()
        raise
    return _Found(store, proxy.port, proxy)


def _listener(meeting: Meeting) -> socket.socket:
    """Listen on rank 0's address alone, not on all addresses of the machine."""
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
    """Return whether this process is ``rank`` at the store. If not, invalidate the store and wait for its end."""
    try:
        if store.compare_set(_key(rank), "", mine).decode() == mine:
            return True
        log.info("the previous group still has a rank %d; waiting for it to end", rank)
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
            raise LockstepBroken(f"Two processes are rank {twice}.", hint="All ranks restart.")
        if time.monotonic() - noted > NOTE_S:
            log.info("waiting for rank %s", ", ".join(map(str, missing)))
            noted = time.monotonic()
        time.sleep(LOOK_S / 10)


def _compare(rank: int, other: Facts, mine: Facts) -> None:
    if other.fingerprint != mine.fingerprint:
        raise FingerprintMismatch(
            f"Rank {rank} serves a different checkpoint: {other.fingerprint} there, {mine.fingerprint} here.",
            hint="Give all ranks the same --model.",
        )
    for name in ("package", "wire", "dtype", "exchange"):
        if getattr(other, name) != getattr(mine, name):
            raise ConfigError(
                f"Rank {rank} differs in its {name}: {getattr(other, name)} there, {getattr(mine, name)} here.",
                hint=_ALIKE,
            )
    if differ_in_format(mine.weights, other.weights):
        raise FingerprintMismatch(
            f"Rank {rank} holds experts in {format_of(other.weights)}, this rank in {format_of(mine.weights)}.",
            hint="Give all ranks the same --expert-format and --dense-format.",
        )
    if other.weights != mine.weights:
        raise FingerprintMismatch(
            f"Rank {rank} serves different weights of the same shape: {other.weights} there, {mine.weights} here.",
            hint="Give all ranks the same --model.",
        )


def _facts_of(rank: int, data: bytes) -> Facts:
    try:
        return msgspec.json.decode(data, type=Facts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LockstepBroken(f"The handshake of rank {rank} cannot be read: {error}.", hint=_ALIKE) from error


def _key(rank: int) -> str:
    return f"rank/{rank}"
