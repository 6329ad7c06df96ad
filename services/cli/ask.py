"""`expertmesh ask`: prints one completion from a running server as it streams. The exit code is 1 without one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from services.config import OptionParser
from services.errors import ConfigError, ExpertMeshError
from services.runtime.local_servers import local_servers, root_url

_KEY = "OPENAI_API_KEY"
_URL = "http://127.0.0.1:8000"


class NoAnswer(ExpertMeshError):
    """The server refused, or its stream ended early."""


def main(argv: Sequence[str]) -> int:
    """Prints the completion.

    Raises:
        NoAnswer: there is none; the error says why.
        ConfigError: several servers run on this machine, and none is chosen.
    """
    given = _parser().parse_args(argv)
    key = os.environ.get(_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = root_url(given.url or _local_url())
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=given.timeout, trust_env=False) as client:
            words = 0
            for text in _texts(client, given):
                words += bool(text)
                print(text, end="", flush=True)
    except httpx.HTTPError as error:
        raise NoAnswer(f"{url} does not answer: {str(error).rstrip('.') or type(error).__name__}.") from error
    print()
    if not words:
        raise NoAnswer("The stream ended without a token.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        "expertmesh ask", f"Stream one completion from a running server. {_KEY} is sent if it is set."
    )
    parser.add_argument("prompt", help="text to complete; - reads it from the standard input")
    parser.add_argument(
        "--chat", action="store_true", help="send it as a user's chat message: for models that follow instructions"
    )
    parser.add_argument("--url", help=f"the server (default: the one on this machine, or else {_URL})")
    parser.add_argument("--model", metavar="NAME", help="default: the model that the server lists")
    parser.add_argument("--max-tokens", type=int, default=40, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds to wait for each chunk (default: %(default)s)",
    )
    return parser


def _local_url() -> str:
    """Returns the URL of the server that this user runs on this machine, or `serve`'s default where none runs."""
    urls = [server.url for server in local_servers()]
    if len(urls) > 1:
        raise ConfigError("Several servers run on this machine.", hint=f"Choose one by --url: {', '.join(urls)}.")
    return urls[0] if urls else _URL


def _texts(client: httpx.Client, given: argparse.Namespace) -> Iterator[str]:
    model = given.model or _checked(client.get("/v1/models")).json()["data"][0]["id"]
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    path, what = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]})
        if given.chat
        else ("/v1/completions", {"prompt": prompt})
    )
    body = {"model": model, **what, "max_tokens": given.max_tokens, "temperature": 0, "stream": True}
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            response.read()
        for line in _checked(response).iter_lines():
            if line.startswith("data: {"):
                yield _text(json.loads(line.removeprefix("data: ")))


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code == 401 and not os.environ.get(_KEY):
        raise NoAnswer(
            f"The server answers 401: it asks for an API key, and {_KEY} is not set.",
            hint="Set it. For `helm test` the Secret in auth.existingSecret needs one in plain text (auth.plainKey).",
        )
    if response.status_code != 200:
        raise NoAnswer(f"The server answers {response.status_code}: {_message(response)}")
    return response


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, TypeError, LookupError):  # of a proxy, perhaps
        return response.text.strip()[:500]


def _text(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise NoAnswer(f"The stream ended with an error: {chunk['error'].get('message')}")
    return "".join(
        str(choice["text"] if "text" in choice else choice["delta"].get("content") or "") for choice in chunk["choices"]
    )
