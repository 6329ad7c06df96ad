"""Requests that failed on too many workers, kept for an operator (``expertmesh queue``)."""

from __future__ import annotations

import builtins
import logging
from dataclasses import dataclass, replace

from msgspec import structs
from redis.asyncio import Redis

from services.errors import NotFound, UnreadableMessage
from services.messages import GenerateRequest, decode_request, encode
from services.queue.connect import command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.prompts import unpack_ids, whole
from services.queue.scripts import Scripts, milliseconds

log = logging.getLogger(__name__)

_FIELDS = ("body", "attempt", "reason", "failures", "when", "worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """One dead request. ``request`` is its last attempt: the prompt and the tokens delivered until then."""

    request: GenerateRequest
    reason: str
    failures: int
    when_ms: int
    last_worker: str


class DeadLetters:
    """The dead-letter list. All methods raise QueueUnavailable while Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys, limits or QueueLimits())

    async def list(self, limit: int = 100) -> builtins.list[DeadLetter]:
        """Returns the dead letters that this release can read, the newest first, without their prompts."""
        ids = await command(self._redis, "ZREVRANGE", self._keys.dead, 0, limit - 1)
        letters: builtins.list[DeadLetter] = []
        for request_id in ids:
            try:
                letters.append(await self._read(request_id.decode()))
            except (NotFound, UnreadableMessage) as error:
                log.warning("%s", error.message)
        return letters

    async def show(self, request_id: str) -> DeadLetter:
        """Returns a dead letter with its prompt. Raises NotFound, also if the prompt is gone, or UnreadableMessage."""
        letter = await self._read(request_id)
        request = letter.request
        if not request.prompt:
            return letter
        ids = unpack_ids(await command(self._redis, "GET", self._keys.prompt(request.prompt)) or b"")
        if len(ids) != request.prompt_len:
            raise NotFound(f"The prompt of the dead letter {request_id!r} is gone.", hint="Drop it.")
        return replace(letter, request=whole(request, ids))

    async def retry(self, request_id: str, *, reply_to: str, timeout_s: float) -> GenerateRequest:
        """Admits the prompt again, past the bounds and with no failures counted; the results go to ``reply_to``.

        The caller has sent a heartbeat as the :class:`GatewayQueue` of incarnation ``reply_to`` and then follows its
        stream. Raises NotFound.
        """
        last, shown = (await self._read(request_id)).request, (await self.show(request_id)).request
        prompt = shown.token_ids[: shown.prompt_len]
        request = structs.replace(last, token_ids=[] if last.prompt else prompt, reply_to=reply_to)
        reply = await self._scripts.run(
            "retry_dead",
            *(request_id, reply_to, milliseconds(timeout_s), request.tenant, request.priority, request.cost),
            *(request.sampling.max_tokens, encode(request), request.prompt),
        )
        if reply is None:
            raise _unknown(request_id)
        return structs.replace(request, token_ids=prompt, prompt="", attempt=reply[0], deadline_ms=reply[1])

    async def drop(self, request_id: str) -> None:
        """Forgets a dead letter. Raises NotFound."""
        if not await self._scripts.run("drop_dead", request_id):
            raise _unknown(request_id)

    async def _read(self, request_id: str) -> DeadLetter:
        values = await command(self._redis, "HMGET", self._keys.dead_letter(request_id), *_FIELDS)
        body, attempt, reason, failures, when_ms, worker = values
        if body is None:
            raise _unknown(request_id)
        return DeadLetter(
            request=structs.replace(decode_request(body), attempt=int(attempt)),
            reason=reason.decode(),
            failures=int(failures),
            when_ms=int(when_ms),
            last_worker=worker.decode(),
        )


def _unknown(request_id: str) -> NotFound:
    return NotFound(f"There is no dead letter {request_id!r}.", hint="`expertmesh queue list` shows all of them.")
