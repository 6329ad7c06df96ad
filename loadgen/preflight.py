"""What is asked of a server before a run: what it serves, what it accepts, and answers to compare others with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from loadgen.answers import Answers
from loadgen.drive import drive
from loadgen.errors import ServerUnusable
from loadgen.plan import Closed, Plan
from loadgen.seen import Seen
from loadgen.workload.conversation import Conversation, Source
from loadgen.workload.synthetic import TOOLS

_WAIT_S = 30.0
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """``name``: what it calls itself, where it does."""

    model: str
    name: str | None


def find_server(url: str, model: str | None, key: str | None, ca: Path | None, wait_s: float = 0.0) -> Server:
    """Returns the server at ``url`` with ``model``, or with the only one that it serves. One that does not answer, or
    is not ready, is asked again for ``wait_s`` seconds.

    Raises:
        ServerUnusable: it is not there, or serves other models.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            if wait_s:
                _ready(url, ca)
            return _found(url, model, key, ca)
        except ServerUnusable:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


def _ready(url: str, ca: Path | None) -> None:
    """Raises ServerUnusable where the server says that it does not serve yet; one without such a page serves."""
    try:
        status = httpx.get(f"{url}/ready", timeout=_WAIT_S, verify=str(ca) if ca else True).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnusable(f"{url} does not answer: {error}.") from error
    if status == httpx.codes.SERVICE_UNAVAILABLE:
        raise ServerUnusable(f"{url} is not ready to serve.", hint="`expertmesh status` says what is missing.")


def _found(url: str, model: str | None, key: str | None, ca: Path | None) -> Server:
    try:
        answer = httpx.get(f"{url}/v1/models", headers=_headers(key), timeout=_WAIT_S, verify=str(ca) if ca else True)
        names = [str(each["id"]) for each in answer.raise_for_status().json()["data"]]
    except httpx.HTTPStatusError as error:
        hint = "Set OPENAI_API_KEY or --api-key-file." if error.response.status_code in (401, 403) else None
        raise ServerUnusable(f"{url}/v1/models answers {error.response.status_code}.", hint=hint) from error
    except httpx.TransportError as error:
        raise ServerUnusable(f"{url} does not answer: {str(error).rstrip('.')}.", hint="Is it up?") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ServerUnusable(
            f"{url}/v1/models does not answer as an OpenAI-compatible server does: {error}.",
            hint="Give the address without /v1.",
        ) from error
    if model is None and len(names) == 1:
        return Server(names[0], answer.headers.get("server"))
    if model not in names:
        raise ServerUnusable(f"{url} serves {', '.join(names) or 'no model'}.", hint="Name one of these with --model.")
    return Server(model, answer.headers.get("server"))


def accepts_tools(url: str, model: str, key: str | None, ca: Path | None) -> bool:
    """Returns whether the server takes a chat with tools.

    Raises:
        ServerUnusable: it does not answer.
    """
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}], "tools": list(TOOLS)}
    try:
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json=body,
            headers=_headers(key),
            timeout=_WAIT_S,
            verify=str(ca) if ca else True,
        )
    except httpx.HTTPError as error:
        raise ServerUnusable(f"{url} does not answer: {error}.") from error
    return answer.status_code == 200


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class _Others:
    """Conversations of ``source`` from a number on that no run reaches: none of them warms a prefix cache for it."""

    source: Source
    first: int

    @property
    def kind(self) -> str:
        return self.source.kind

    @property
    def text(self) -> str:
        return self.source.text

    def conversation(self, number: int) -> Conversation:
        return self.source.conversation(self.first - number)


def warm_up(plan: Plan, requests: int) -> None:
    """Send ``requests`` one by one, which nobody measures.

    Raises:
        ServerUnusable: it does not answer them.
    """
    if requests:
        one_by_one = replace(plan, source=_Others(plan.source, -1), answers=None, record_to=None)
        _all_well(plan, _serial(one_by_one, requests))


def learned(plan: Plan, requests: int) -> Answers:
    """Returns the answers to the first ``requests`` of a run when nothing else is asked.

    Raises:
        ServerUnusable: it does not answer them.
    """
    answers = Answers(source="serial run")
    taught = replace(plan, answers=None, record_to=None, on_answer=answers.learn)
    _all_well(plan, _serial(taught, requests))
    return answers


def _serial(plan: Plan, requests: int) -> Sequence[Seen]:
    return drive(
        replace(
            plan,
            load=Closed(1, requests, None),
            shard=(0, 1),
            start_at=None,
            manners=replace(plan.manners, disconnect_share=0.0),
        )
    ).seen


def _all_well(plan: Plan, every: Sequence[Seen]) -> None:
    for seen in every:
        if seen.error is not None and seen.outcome != "ok":
            kind, text = seen.error
            raise ServerUnusable(f"{plan.url} does not answer a request ({kind}): {text}", hint=_hint(text))


def _hint(text: str) -> str | None:
    hints: Mapping[str, str] = {
        "ignore_eos": "Give --no-ignore-eos.",
        "chat template": "Give --endpoint completions.",
        "context": "Give shorter --prompt-tokens or --output-tokens.",
        "priority": "Leave priorities out of --tenants.",
        "vocab": "Give --vocabulary N, or --text for prompts of words.",
    }
    return next((hint for word, hint in hints.items() if word in text.lower()), None)
