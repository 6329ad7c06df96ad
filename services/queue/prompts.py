"""Prompts as Redis keeps them: each once, named by its content, separate from the records of its requests.

In: whole requests of a gateway. Out: requests without their prompts, and the prompts as bytes (int32, little-endian:
four bytes a token). :class:`PromptReader` joins both for workers; a scheduler needs only the beginning of a prompt.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs
from redis.asyncio import Redis

from services.errors import UnreadableMessage
from services.messages import GenerateRequest, decode_request, encode
from services.queue.connect import command
from services.queue.keys import Keys

ID_BYTES = 4
HEAD_TOKENS = 8192
"""How much of a prompt's beginning a scheduler gets."""
_NAME_BYTES = 16


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Returns token ids in the form that Redis keeps."""
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
    return ids.tobytes() if sys.byteorder == "little" else _swapped(ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """Inverts :func:`pack_ids`; bytes beyond whole ids are left out."""
    ids = array("i", data[: len(data) // ID_BYTES * ID_BYTES])
    return ids if sys.byteorder == "little" else _swapped(ids)


def _swapped(ids: array[int]) -> array[int]:
    swapped = array("i", ids)
    swapped.byteswap()
    return swapped


@dataclass(frozen=True, slots=True)
class Stored:
    """A request in the form of its record. ``name`` is '' where ``body`` holds the prompt itself."""

    request: GenerateRequest
    body: bytes
    name: str
    ids: bytes


class PromptStore:
    """Makes records of requests. ``prompts`` has, by name, the prompts that requests name; other requests hold their
    own. A prompt that several requests share is packed once."""

    def __init__(self, prompts: Mapping[str, array[int]] | None = None) -> None:
        self._prompts = prompts or {}
        self._packed: dict[str, bytes] = {}

    def stored(self, request: GenerateRequest, *, by_name: bool) -> Stored:
        """Returns ``request`` for its record. With ``by_name`` the record names the prompt, unless the delivered tokens
        are as many: an earlier release takes the first ``prompt_len`` of ``token_ids`` for the prompt, and refuses a
        request that has fewer, so no reader of any release mistakes delivered tokens for the prompt.
        """
        if not by_name or request.delivered >= request.prompt_len:
            joined = whole(request, self._prompts[request.prompt]) if request.prompt else request
            return Stored(request, encode(joined), "", b"")
        if request.prompt:
            return Stored(request, encode(request), request.prompt, self._ids(request.prompt))
        ids = pack_ids(request.token_ids[: request.prompt_len])
        name = prompt_name(request.tenant, ids)
        short = structs.replace(request, token_ids=request.token_ids[request.prompt_len :], prompt=name)
        return Stored(request, encode(short), name, ids)

    def _ids(self, name: str) -> bytes:
        if name not in self._packed:
            self._packed[name] = pack_ids(self._prompts[name])
        return self._packed[name]


def prompt_name(tenant: str, ids: bytes) -> str:
    """Returns the name of the prompt ``ids`` of ``tenant``. Requests of other tenants never share it."""
    digest = hashlib.blake2b(ids, digest_size=_NAME_BYTES, person=b"prompt", key=tenant.encode()[:64])
    return digest.hexdigest()


def whole(request: GenerateRequest, prompt: Sequence[int]) -> GenerateRequest:
    """Returns ``request`` with ``prompt`` in front of its delivered tokens."""
    return structs.replace(request, token_ids=[*prompt, *request.token_ids], prompt="")


class PromptReader:
    """Joins requests with the prompts that they name. It keeps what it has read: make one for each call."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._read: dict[str, array[int]] = {}

    async def whole(self, request: GenerateRequest) -> GenerateRequest:
        """Returns ``request`` with the prompt, maybe in its record by now. Raises UnreadableMessage if it is nowhere.

        The record may be of a later attempt; then the results of ``request`` will be refused anyway.
        """
        if not request.prompt and len(request.token_ids) >= request.prompt_len:
            return request
        if request.prompt and (ids := await self._ids(request.prompt)) and len(ids) == request.prompt_len:
            return whole(request, ids)
        recorded = await self._recorded(request)
        if not recorded.prompt and len(recorded.token_ids) >= request.prompt_len:
            return structs.replace(request, token_ids=recorded.token_ids, prompt="")
        if not request.prompt and recorded.prompt:  # it came by way of an earlier release
            return await self.whole(structs.replace(request, prompt=recorded.prompt))
        raise UnreadableMessage(f"the prompt of {request.id} is missing")

    async def _ids(self, name: str) -> array[int]:
        if name not in self._read:
            self._read[name] = unpack_ids(await command(self._redis, "GET", self._keys.prompt(name)) or b"")
        return self._read[name]

    async def _recorded(self, request: GenerateRequest) -> GenerateRequest:
        return decode_request(await command(self._redis, "HGET", self._keys.request(request.id), "body") or b"")
