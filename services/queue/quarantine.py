"""Messages in Redis that a process cannot read. They are counted, logged and kept for an operator; the reader goes on.

Most are of a later release, written before it saw that an earlier one still reads them; others are damaged, or written
by a process that should not be there.
"""

from __future__ import annotations

import base64
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import msgspec
from prometheus_client import Counter
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.config import Settings
from services.errors import QueueUnavailable, UnreadableMessage
from services.queue.connect import command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scripts import Scripts

Kind = Literal["event", "request", "inbox", "worker", "seat", "load", "table", "assignment"]
_MAX_BYTES = 4096
_MAX_KNOWN = 1024

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A message that could not be read. ``source`` names its writer or subject, ``data`` is its beginning in base64."""

    kind: Kind
    source: str
    reason: str
    reader: str
    data: str
    size: int
    when_ms: int = 0


class Quarantine:
    """Takes the unreadable messages of the process ``reader``. ``count`` is called with the kind of each. Nothing is
    kept without ``scripts``, as for commands that change nothing."""

    def __init__(
        self, scripts: Scripts | None = None, reader: str = "", count: Callable[[str], None] = lambda _: None
    ) -> None:
        self._scripts = scripts
        self._reader = reader
        self._count = count
        self._known: OrderedDict[tuple[Kind, str], None] = OrderedDict()

    @classmethod
    def of(cls, redis: Redis, settings: Settings, reader: str, unreadable: Counter) -> Quarantine:
        """Returns the quarantine of a role; ``unreadable`` counts what it takes."""
        scripts = Scripts(redis, Keys(settings.namespace), QueueLimits.of(settings))
        return cls(scripts, reader, lambda kind: unreadable.labels(kind).inc())

    async def put(self, kind: Kind, source: str, error: UnreadableMessage, data: bytes) -> None:
        """Takes a message. Does nothing where this kind of ``source`` is known: records are read again and again."""
        if (kind, source) in self._known:
            return
        self._known[kind, source] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        self._count(kind)
        log.error("%s (%s of %s); see `expertmesh queue unreadable`", error.message, kind, source[:256])
        if self._scripts is None:
            return
        kept = Kept(
            kind=kind,
            source=source[:256],
            reason=error.message[:512],
            reader=self._reader,
            data=base64.b64encode(data[:_MAX_BYTES]).decode(),
            size=len(data),
        )
        try:
            await self._scripts.run("quarantine", msgspec.json.encode(kept))
        except (QueueUnavailable, ResponseError) as refused:  # its reader goes on, whatever is in the way
            log.warning("cannot keep the unreadable message: %s", refused)


async def quarantined(redis: Redis, keys: Keys) -> list[Kept]:
    """Returns what is kept, the newest first, without entries that are damaged themselves. Raises QueueUnavailable."""
    entries = [_kept(entry) for entry in await command(redis, "LRANGE", keys.unreadable, 0, -1)]
    return [entry for entry in entries if entry is not None]


def _kept(entry: bytes) -> Kept | None:
    when_ms, _, kept = entry.partition(b":")
    try:
        return msgspec.structs.replace(msgspec.json.decode(kept, type=Kept), when_ms=int(when_ms))
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("skipped a damaged entry of %d bytes: %s", len(entry), error)
        return None
