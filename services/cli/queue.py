"""`expertmesh queue`: dead letters and unreadable messages, for an operator. A retry is followed to its end."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from services.config import OptionParser, Settings, parse_options
from services.errors import ConfigError, InternalError, error_from_info
from services.gateway.tokenizer import TextCodec, load_codec, read_tokenizer_config
from services.messages import AttemptLost, GenerateRequest, TokenEvent
from services.model.hub import with_checkpoint
from services.queue.connect import connect
from services.queue.dead_letters import DeadLetter, DeadLetters
from services.queue.gateway_side import FIRST_ID, GatewayQueue, Unreadable
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.quarantine import Kept, quarantined
from services.runtime import printable
from services.runtime.local_servers import add_url, none_found, with_local_server
from services.runtime.tasks import end_tasks

_ACTIONS = ("list", "show", "retry", "drop", "unreadable")
_WITHOUT_ID = ("list", "unreadable")
_WITH_TEXT = ("show", "retry")
_BLOCK_MS = 1_000
_SHOWN_BYTES = 256


def main(argv: Sequence[str]) -> int:
    """Runs one action and returns the exit code."""
    parser = OptionParser("expertmesh queue", "Inspect requests that failed on too many workers (dead letters).")
    parser.add_argument(
        "action",
        choices=_ACTIONS,
        help="retry runs the request again and prints its result; unreadable lists messages in Redis that a "
        "process could not decode",
    )
    parser.add_argument("id", nargs="?", help="id of the request, as `list` shows it")
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="maximum number of entries that `list` shows"
    )
    add_url(parser)
    given = parse_options(
        parser, argv, ["redis_url", "redis_url_file", "namespace", "model", "request_timeout", "lease"]
    )
    if (given["action"] in _WITHOUT_ID) == bool(given["id"]):
        raise ConfigError(
            "`list` and `unreadable` take no id; all other actions need one.", hint="See `expertmesh queue --help`."
        )
    settings, _ = with_local_server(given)
    return asyncio.run(_run(given, settings))


async def _run(given: dict[str, Any], settings: Settings) -> int:
    if settings.redis_url is None:
        raise ConfigError("Which queue?", hint=f"{none_found()}: give its Redis with --redis-url.")
    redis_url, codec = settings.redis_url, _codec(settings) if given["action"] in _WITH_TEXT else None
    redis = connect(redis_url)
    keys, limits = Keys(settings.namespace), QueueLimits.of(settings)
    letters = DeadLetters(redis, keys, limits)
    try:
        if given["action"] == "list":
            _print_list(await letters.list(given["limit"]))
        elif given["action"] == "unreadable":
            _print_unreadable(await quarantined(redis, keys))
        elif given["action"] == "show":
            _print_letter(await letters.show(given["id"]), codec)
        elif given["action"] == "drop":
            await letters.drop(given["id"])
            print(f"dropped {given['id']}")
        else:
            incarnation = f"cli-{uuid.uuid4().hex}"
            queue = GatewayQueue(redis, keys, incarnation, limits)
            return await Retry(incarnation, queue, letters, settings, codec).run(given["id"])
    finally:
        await redis.aclose()
    return 0


def _codec(settings: Settings) -> TextCodec | None:
    """Returns what turns tokens into text; None where no model is named."""
    model = with_checkpoint(settings, weights=False).model
    return load_codec(model, read_tokenizer_config(model)) if model else None


class Retry:
    """Runs a dead letter again, in place of the gateway that the request came from."""

    def __init__(
        self,
        incarnation: str,
        queue: GatewayQueue,
        letters: DeadLetters,
        settings: Settings,
        codec: TextCodec | None,
    ) -> None:
        self._incarnation = incarnation
        self._queue = queue
        self._letters = letters
        self._settings = settings
        self._codec = codec

    async def run(self, request_id: str) -> int:
        """Runs the request again and prints its outcome; 0 if it finished, 1 if it failed."""
        await self._queue.heartbeat(self._settings.lease)
        beating = asyncio.create_task(self._beat())
        try:
            request = await self._letters.retry(
                request_id, reply_to=self._incarnation, timeout_s=self._settings.request_timeout
            )
            return self._report(*await self._follow(request))
        finally:
            await end_tasks([beating])
            await self._queue.leave()  # interrupted: the scheduler cancels what is still ours

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease / 4)
            await self._queue.heartbeat(self._settings.lease)

    async def _follow(self, request: GenerateRequest) -> tuple[list[int], TokenEvent]:
        """Returns the generated tokens and the event that ended them."""
        tokens = request.token_ids[request.prompt_len :]
        last_id = FIRST_ID
        while True:
            last_id, events = await self._queue.follow(last_id, _BLOCK_MS)
            for event in events:
                if event.request_id != request.id:
                    continue
                if isinstance(event, AttemptLost):
                    await self._resubmit(request, event.attempt, tokens)
                    continue
                if isinstance(event, Unreadable):
                    raise InternalError(f"The answer cannot be read: {event.reason}")
                if event.token_id is not None and event.index == len(tokens):
                    tokens.append(event.token_id)
                if event.finish:
                    return tokens, event

    async def _resubmit(self, request: GenerateRequest, attempt: int, tokens: list[int]) -> None:
        prompt = request.token_ids[: request.prompt_len]
        await self._queue.resubmit(msgspec.structs.replace(request, attempt=attempt, token_ids=[*prompt, *tokens]))

    def _report(self, tokens: list[int], end: TokenEvent) -> int:
        print(_text(tokens, self._codec))
        if end.error:
            print(printable(f"failed: {error_from_info(end.error).message}"))
            return 1
        print(f"finished: {end.finish}, {len(tokens)} tokens")
        return 0


def _print_list(letters: Sequence[DeadLetter]) -> None:
    for letter in letters:
        print(printable("  ".join([letter.request.id, _when(letter), f"{letter.failures} failures", letter.reason])))
    if not letters:
        print("no dead letters")


def _print_unreadable(found: Sequence[Kept]) -> None:
    """Prints each message with its first bytes, as Python writes them."""
    for kept in found:
        head = [_moment(kept.when_ms), f"{kept.kind} of {kept.source}", f"read by {kept.reader}"]
        print(printable("  ".join([*head, kept.reason])))
        print(f"    {base64.b64decode(kept.data)[:_SHOWN_BYTES]!r}")
    if not found:
        print("nothing was unreadable")


def _print_letter(letter: DeadLetter, codec: TextCodec | None) -> None:
    request = letter.request
    rows = {
        "id": request.id,
        "tenant": request.tenant,
        "priority": request.priority,
        "when": _when(letter),
        "reason": letter.reason,
        "failures": letter.failures,
        "last worker": letter.last_worker,
        "sampling": msgspec.json.encode(request.sampling).decode(),
        "prompt": _text(request.token_ids[: request.prompt_len], codec),
        "delivered": _text(request.token_ids[request.prompt_len :], codec),
    }
    width = max(map(len, rows))
    print("\n".join(printable(f"{name:<{width}}  {value}") for name, value in rows.items()))


def _when(letter: DeadLetter) -> str:
    return _moment(letter.when_ms)


def _moment(when_ms: int) -> str:
    return datetime.fromtimestamp(when_ms / 1000, UTC).isoformat(timespec="seconds")


def _text(token_ids: Sequence[int], codec: TextCodec | None) -> str:
    """Returns the text, printable, where --model names the tokenizer; else the ids."""
    return printable(codec.decode(token_ids)) if codec else " ".join(map(str, token_ids))
