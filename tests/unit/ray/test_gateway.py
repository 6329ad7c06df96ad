"""The gateway as Serve's replicas run it: its life, what it answers by itself, and how answers are broken off."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from testkit.pocket.answers import POCKET

pytest.importorskip("ray", reason="Ray has no wheel for this Python")

from services.config import Settings
from services.gateway import role
from services.gateway.connections import Bounds
from services.gateway.stream import Outlet
from services.ray.arguments import read
from services.ray.gateway import BrokenOff, GatewayApp, _Call, gateway_of

PAGES = [{"targets": ["10.0.0.1:9000"], "labels": {"process": "attention-0"}}]
KEY = "sk-of-a-test-12345678"


@pytest.fixture(autouse=True)
def _process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A gateway sets up the process that it has to itself; here it is that of other tests, too."""
    for name in ("keep_one_heap", "collect_seldom"):
        monkeypatch.setattr(role, name, lambda: None)
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def settings(**others: Any) -> Settings:
    """Nobody listens at the Redis: a gateway starts without, and says so to clients."""
    given = {"model": POCKET / "model", "redis_url": "redis://127.0.0.1:1", "host": "0.0.0.0", "auth": "off"}
    return Settings(**given | others)


async def pages() -> list[dict[str, Any]]:
    return PAGES


class Lifespan:
    """What Serve does at the start and the end of a replica."""

    def __init__(self, app: GatewayApp) -> None:
        self._in: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.running = asyncio.ensure_future(app({"type": "lifespan"}, self._in.get, self._out.put))

    async def say(self, what: str) -> str:
        self._in.put_nowait({"type": f"lifespan.{what}"})
        said: str = (await self._out.get())["type"]
        return said


@asynccontextmanager
async def alive(given: Settings) -> AsyncIterator[GatewayApp]:
    app = GatewayApp(given, pages)
    lifespan = Lifespan(app)
    assert await lifespan.say("startup") == "lifespan.startup.complete"
    yield app
    assert await lifespan.say("shutdown") == "lifespan.shutdown.complete"
    await lifespan.running
    assert app.failure is None


async def get(app: GatewayApp, path: str, *, prefix: str = "", key: str = "") -> tuple[int, Any]:
    """Ask as Serve does, which leaves the route prefix in front of the path."""
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        "type": "http",
        "method": "GET",
        "path": prefix + path,
        "raw_path": (prefix + path).encode(),
        "root_path": prefix,
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive, send)
    return said[0]["status"], json.loads(b"".join(each.get("body", b"") for each in said[1:]))


async def test_it_lives_as_long_as_its_replica_and_lists_the_pages_of_all() -> None:
    async with alive(settings()) as app:
        assert (await get(app, "/"))[1]["models"] == "/v1/models"
        assert await get(app, "/metrics/targets") == (200, PAGES)
        assert await get(app, "/metrics/targets", prefix="/llm") == (200, PAGES)


async def test_the_pages_need_a_key_where_clients_do(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "prometheus", "sha256": sha256(KEY.encode()).hexdigest()}]}))
    async with alive(settings(auth="auto", api_keys_file=keys)) as app:
        assert (await get(app, "/metrics/targets"))[0] == 401
        assert await get(app, "/metrics/targets", key=KEY) == (200, PAGES)


async def test_one_that_could_not_start_says_so_and_answers_nothing(tmp_path: Path) -> None:
    app = GatewayApp(settings(model=tmp_path), pages)
    assert await Lifespan(app).say("startup") == "lifespan.startup.failed"
    assert app.failure is not None
    status, said = await get(app, "/v1/models")
    assert (status, said["error"]["code"]) == (503, "unavailable")


async def test_an_answer_that_was_aborted_breaks_its_connection() -> None:
    sent: list[Any] = []
    heard: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, answer: Any) -> None:
        outlet = Outlet(scope, answer)
        await outlet.write(b"half of")
        outlet.abort()
        heard.append(await receive())

    async def never() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(BrokenOff):
        await _Call(app, Bounds(), never).answer({"type": "http", "headers": []}, send)
    assert [message["body"] for message in sent] == [b"half of"]
    assert heard == [{"type": "http.disconnect"}]


@pytest.mark.parametrize(("asked", "left"), [("mine", []), ("other", [b"mine"])])
async def test_an_id_that_serve_puts_on_the_answer_is_there_once(asked: str, left: list[bytes]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(_scope: Any, _receive: Any, answer: Any) -> None:
        await answer({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"mine")]})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "headers": [(b"x-request-id", asked.encode())]}
    await _Call(app, Bounds(), receive).answer(scope, send)
    assert [value for _, value in sent[0]["headers"]] == left


def test_its_deployment_holds_no_secret_is_bounded_and_waits_for_open_requests(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:very-secret@redis:6379/0\n")
    given = {"model": str(POCKET / "model"), "redis_url_file": str(file), "request_timeout": 900}
    arguments = read({"settings": given, "gateways": {"max_queued": 7}})
    bound = gateway_of(arguments, arguments.checked_settings(), controller=None)._bound_deployment
    assert "very-secret" not in json.dumps(bound.init_args)
    assert bound.init_args[0]["redis_url_file"] == str(file)
    assert bound._deployment_config.max_queued_requests == 7
    assert bound._deployment_config.graceful_shutdown_timeout_s > 900
