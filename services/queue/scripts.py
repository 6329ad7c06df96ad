"""The Lua scripts: every change to the queue's state is one of them, so it happens whole or not at all.

In: names and arguments. Out: replies, or typed errors. A script file starts with ``--@use`` and the libraries (other
files) that are put in front of it. Every call passes the key prefix as its one key and the limits as the first
argument, and runs by hash; a process that may load scripts gives a server the text. Long lists are cut into calls that
block Redis for a short time only (:func:`pieces`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from services.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    ExpertMeshError,
    FingerprintMismatch,
    QueueUnavailable,
    StaleLeader,
    StaleTable,
    Unavailable,
    VersionMismatch,
)
from services.queue.connect import queue_errors
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.prompts import HEAD_TOKENS, ID_BYTES, Stored
from services.wire import OLDEST_WIRE, WIRE, differ_in_format, format_of

CHUNK = 500
"""Requests per call; the fields of one XADD must fit Lua's stack."""
Argument = bytes | str | int | float


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


def load_scripts() -> dict[str, Script]:
    """Loads all scripts by name, libraries resolved."""
    folder = resources.files("services.queue") / "lua"
    files = [file for file in folder.iterdir() if file.name.endswith(".lua")]
    sources = {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in files}
    return {name: _link(text, sources) for name, text in sources.items() if text.startswith("--@use")}


def _link(text: str, sources: dict[str, str]) -> Script:
    libraries = text.splitlines()[0].split()[1:]
    whole = "\n".join([*(sources[library] for library in libraries), text])
    return Script(whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


class Scripts:
    """Runs scripts for one namespace under one set of limits."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits) -> None:
        self._redis = redis
        self._prefix = keys.prefix
        self._scripts = load_scripts()
        self._limits = pack_limits(limits)

    async def run(self, name: str, *arguments: Argument) -> Any:
        """Returns the script's reply. Raises QueueUnavailable, or the error that the script names (:func:`_typed`)."""
        with queue_errors():
            try:
                return await self._evaluate(self._scripts[name], (1, self._prefix, self._limits, *arguments))
            except ResponseError as error:
                if typed := _typed(str(error)):
                    raise typed from error
                raise

    async def _evaluate(self, script: Script, rest: tuple[Argument, ...]) -> Any:
        try:
            return await self._redis.execute_command("EVALSHA", script.sha, *rest)  # type: ignore[no-untyped-call]
        except NoScriptError:
            await self._load(script)
            return await self._redis.execute_command("EVALSHA", script.sha, *rest)  # type: ignore[no-untyped-call]

    async def _load(self, script: Script) -> None:
        try:
            await self._redis.execute_command("SCRIPT", "LOAD", script.text)  # type: ignore[no-untyped-call]
        except NoPermissionError as error:
            raise QueueUnavailable(
                "The queue is unavailable: Redis has no scripts until a scheduler loads them.", retry_after_s=1
            ) from error

    async def run_chunks(self, name: str, head: tuple[Argument, ...], items: list[tuple[Argument, ...]]) -> list[Any]:
        """Returns replies of calls that share the arguments ``head`` and carry all ``items``, CHUNK of them each."""
        parts = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
        return [await self.run(name, *head, *(value for item in part for value in item)) for part in parts]


def milliseconds(seconds: float) -> int:
    """Returns ``seconds`` in ms, at least 1: Redis refuses a lifetime of 0."""
    return max(1, round(seconds * 1000))


def pack_limits(limits: QueueLimits) -> bytes:
    """Packs ``limits`` for the scripts (``C``): times in ms, and the errors that scripts send by themselves."""
    errors = {
        "expired": DeadlineExceeded("The request waited in the queue until its deadline passed.", retry_after_s=10),
        "exhausted": AttemptsExhausted(
            "Too many workers died while running this request, so it was moved to the dead-letter list.",
            hint="An operator can examine and retry it with `expertmesh queue`.",
        ),
        "abandoned": Unavailable("The request lost its worker and was not resubmitted in time.", retry_after_s=1),
    }
    return msgspec.msgpack.encode(
        {
            "max_requests": limits.max_requests,
            "max_tokens": limits.max_tokens,
            "quantum": limits.quantum,
            "refund_quanta": limits.refund_quanta,
            "max_attempts": limits.max_attempts,
            "max_stuck": limits.max_stuck,
            "max_dead": limits.max_dead_letters,
            "max_unreadable": limits.max_unreadable,
            "stream_entries": limits.stream_entries,
            "stream_bytes": limits.stream_bytes,
            "lag_ms": milliseconds(limits.lag_s),
            "lag_bytes": limits.lag_bytes,
            "dead_bytes": limits.dead_letter_bytes,
            "max_keys": limits.max_idempotency_keys,
            "max_all_keys": limits.max_all_idempotency_keys,
            "head_bytes": HEAD_TOKENS * ID_BYTES,
            "wire": WIRE,
            "oldest_wire": OLDEST_WIRE,
            "release": version("expertmesh"),
            "lease_ms": milliseconds(limits.lease_s),
            "tombstone_ms": milliseconds(limits.tombstone_s),
            "lost_ms": milliseconds(limits.lost_s),
            "grace_ms": milliseconds(limits.record_grace_s),
            "stream_ms": milliseconds(limits.stream_s),
            "dead_ms": milliseconds(limits.dead_letter_s),
            "idem_ms": milliseconds(limits.idempotency_s),
            **{name: _text(msgspec.msgpack.encode(error.info())) for name, error in errors.items()},
        }
    )


def _text(data: bytes) -> msgspec.Raw:
    """Returns ``data`` as a msgpack string of 16-bit length, because Redis's cmsgpack does not read byte strings."""
    return msgspec.Raw(b"\xda" + len(data).to_bytes(2, "big") + data)


def _typed(text: str) -> ExpertMeshError | None:
    """Returns the error that the first keyword in ``text`` stands for; clients may have written what follows it."""
    found = re.search("STALELEADER|STALETABLE|WIRE|FINGERPRINT", text)
    kind = found[0] if found else ""
    if kind == "STALELEADER":
        return StaleLeader("Another scheduler leads.", hint="Campaign again before touching the queue.")
    if kind == "STALETABLE":
        highest = text.split("STALETABLE", 1)[1].split()[0]
        return StaleTable(
            f"Epoch {highest} of the routing table is in use already.", hint="Make the table for the next epoch."
        )
    if kind == "WIRE":
        release, versions = text.split("WIRE", 1)[1].split()[:2]
        return VersionMismatch(
            f"Live members of this namespace are of release {release} and read versions {versions} of its messages; "
            f"release {version('expertmesh')} reads {OLDEST_WIRE}-{WIRE}.",
            hint="Upgrade through a release that reads some of both, or stop those members first.",
        )
    if kind == "FINGERPRINT":
        served, what, mine = [*text.split("FINGERPRINT", 1)[1].split(), ""][:3]
        if what == "weights" and differ_in_format(served, mine):
            return FingerprintMismatch(
                f"Live members of this namespace hold experts in {format_of(served)}, and this worker in "
                f"{format_of(mine)}.",
                hint="Start all of them with the same --expert-format and --dense-format, or choose another "
                "--namespace.",
            )
        other = "different weights of the same shape" if what == "weights" else "a different model"
        return FingerprintMismatch(
            f"Live members of this namespace serve {other} (fingerprint {served}).",
            hint="Stop them first, or choose another --namespace.",
        )
    return None


PIECE_REQUESTS = 100
PIECE_BYTES = 1 << 20
"""Bounds of one call, during which Redis serves nobody else."""


def pieces(requests: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Yields ``requests`` in their order, cut into lists that one call may carry, of one request at least."""
    piece: list[Stored] = []
    size, named = 0, set[str]()
    for stored in requests:
        added = len(stored.body) + (0 if stored.name in named else len(stored.ids))
        if piece and (size + added > PIECE_BYTES or len(piece) == PIECE_REQUESTS):
            yield piece
            piece, size, named, added = [], 0, set(), len(stored.body) + len(stored.ids)
        piece.append(stored)
        size += added
        named.add(stored.name)
    yield piece


def parts(rows: Iterable[tuple[Argument, ...]]) -> Iterator[list[tuple[Argument, ...]]]:
    """Yields ``rows`` of arguments, as many as one call may carry: :data:`PIECE_BYTES` and :data:`CHUNK` rows at most,
    one row at least, and no two neighbours of the same request and attempt, which are a row's first two arguments.
    ``rows`` may be a generator: only the rows of one call are kept."""
    part: list[tuple[Argument, ...]] = []
    size = 0
    for row in rows:
        added = sum(len(value) for value in row if isinstance(value, bytes))
        if part and (size + added > PIECE_BYTES or len(part) == CHUNK or part[-1][:2] == row[:2]):
            yield part
            part, size = [], 0
        part.append(row)
        size += added
    if part:
        yield part


def items(piece: Sequence[Stored]) -> Iterator[Argument]:
    """Yields the arguments of ``admit.lua`` for ``piece``; a prompt's ids come with the first request that names it."""
    sent = {""}
    for stored in piece:
        request = stored.request
        yield from (request.id, request.priority, request.cost, request.sampling.max_tokens, request.delivered)
        yield from (stored.body, stored.name, b"" if stored.name in sent else stored.ids)
        sent.add(stored.name)
