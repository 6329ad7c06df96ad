"""Requests that failed on too many workers, kept for an operator (``expertmesh queue``)."""

from __future__ import annotations

import builtins
from dataclasses import dataclass

from msgspec import structs
from redis.asyncio import Redis

from services.errors import NotFound
from services.messages import GenerateRequest, decode_request, encode
from services.queue.connect import command
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.scripts import Scripts, milliseconds

_FIELDS = ("body", "attempt", "reason", "failures", "when", "worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """``request`` is the last attempt: prompt and the tokens delivered until then."""

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
        """The newest first."""
        ids = await command(self._redis, "ZREVRANGE", self._keys.dead, 0, limit - 1)
        letters = [await self._read(request_id.decode()) for request_id in ids]
        return [letter for letter in letters if letter is not None]

    async def show(self, request_id: str) -> DeadLetter:
        """Raises NotFound."""
        letter = await self._read(request_id)
        if letter is None:
            raise _unknown(request_id)
        return letter

    async def retry(self, request_id: str, *, reply_to: str, timeout_s: float) -> GenerateRequest:
        """Admits the prompt again, past the bounds and with no failures counted; the results go to ``reply_to``.

        The caller is a :class:`GatewayQueue` of incarnation ``reply_to`` that has sent a heartbeat and then follows
        its stream. Raises NotFound.
        """
        last = (await self.show(request_id)).request
        request = structs.replace(last, token_ids=last.token_ids[: last.prompt_len], reply_to=reply_to)
        reply = await self._scripts.run(
            "retry_dead",
            *(request_id, reply_to, milliseconds(timeout_s), request.tenant, request.priority, request.cost),
            *(request.sampling.max_tokens, encode(request)),
        )
        if reply is None:
            raise _unknown(request_id)
        return structs.replace(request, attempt=reply[0], deadline_ms=reply[1])

    async def drop(self, request_id: str) -> None:
        """Raises NotFound."""
        removed = await command(self._redis, "DEL", self._keys.dead_letter(request_id))
        await command(self._redis, "ZREM", self._keys.dead, request_id)
        if not removed:
            raise _unknown(request_id)

    async def _read(self, request_id: str) -> DeadLetter | None:
        values = await command(self._redis, "HMGET", self._keys.dead_letter(request_id), *_FIELDS)
        body, attempt, reason, failures, when_ms, worker = values
        if body is None:
            return None
        return DeadLetter(
            request=structs.replace(decode_request(body), attempt=int(attempt)),
            reason=reason.decode(),
            failures=int(failures),
            when_ms=int(when_ms),
            last_worker=worker.decode(),
        )


def _unknown(request_id: str) -> NotFound:
    return NotFound(
        f"There is no dead letter {request_id!r}.", hint="`expertmesh queue list` shows those that there are."
    )
