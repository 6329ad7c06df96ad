"""Who may ask, in which order that is found out, and how much of a tenant's is under way at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from testkit.waiting import LIMIT_S, eventually

from services.errors import Overloaded, RateLimited, WorkLimited
from services.gateway.auth import ApiKey, digest
from services.gateway.connections import Bounds
from services.gateway.guard import Room

URL = "/v1/completions"
GOOD = {"prompt": "hello", "max_tokens": 3}
POSTS = (URL, "/v1/chat/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}


class Keys:
    """Any key is its own tenant; those that begin with "limited" have a rate."""

    async def find(self, sha256: str) -> ApiKey | None:
        for secret in ("alice", "bob", "limited"):
            if digest(secret) == sha256:
                rate = 60.0 if secret == "limited" else None
                return ApiKey(name=secret, sha256=sha256, requests_per_minute=rate)
        return None

    def recall(self, sha256: str) -> ApiKey | None:
        del sha256
        return None

    async def usable(self) -> bool:
        return True


def key(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


class Client:
    """A connection of its own, written to by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, gateway: Any) -> Client:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def post(self, path: str, *fields: str, body: bytes = b"", secret: str | None = None) -> None:
        head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields]
        if secret is not None:
            head.append(f"Authorization: Bearer {secret}")
        self.writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(length))


async def _refusal(client: Client) -> tuple[int, str]:
    status, body = await client.answer()
    return status, body["error"]["code"]


@pytest.mark.parametrize("path", POSTS)
async def test_nothing_of_a_body_is_waited_for_where_less_refuses_it(start, path):
    """Each has declared a body and sent nothing of it."""
    gateway = await start(store=Keys(), max_body_bytes=4096)
    unknown, large, limited = [await Client.of(gateway) for _ in range(3)]
    await unknown.post(path, "Content-Length: 4096")
    assert await _refusal(unknown) == (401, "invalid_api_key")
    await large.post(path, "Content-Length: 4097", secret="limited")
    assert await _refusal(large) == (413, "body_too_large")
    assert gateway.queue.charged == ["limited"], "a body that is refused costs of the rate, too"
    gateway.queue.over_rate = RateLimited("Too many.", retry_after_s=3)
    await limited.post(path, "Content-Length: 4097", secret="limited")
    assert await _refusal(limited) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("path", POSTS)
async def test_every_post_costs_of_the_rate_whatever_is_in_it(start, path):
    gateway = await start(store=Keys())
    for content in (b"{", b"{}", b'{"prompt": 5, "tokens": 5, "messages": 5}'):
        assert (await gateway.http.post(path, content=content, headers=key("limited"))).status_code == 400
    assert gateway.queue.charged == ["limited"] * 3
    await gateway.http.post(path, content=b"{", headers=key("alice"))
    assert gateway.queue.charged == ["limited"] * 3, "no rate, no round trip"


def test_a_room_has_a_share_for_each_and_an_end():
    reported: list[float] = []
    room = Room("bytes", 100, 40, reported.append)
    with room.open("a") as first, room.open("a") as second:
        first.grow(30)
        first.grow(20)
        second.grow(10)
        with pytest.raises(WorkLimited, match="40 bytes") as refused:
            second.grow(11)
        assert refused.value.retry_after_s >= 1
        with room.open("b") as b, room.open("c") as c:
            b.grow(40)
            c.grow(20)
            with pytest.raises(Overloaded, match="100 bytes"):
                c.grow(21)
            assert reported[-1] == 100
        assert reported[-1] == 40
    assert reported[-1] == 0
    assert room._held == {}, "tenants that have nothing are not remembered"


async def test_bodies_under_way_have_room_and_one_tenant_a_part_of_it(start):
    gateway = await start(store=Keys(), max_body_bytes=20_000, body_room=80_000)
    held = await Client.of(gateway)
    await held.post(URL, "Content-Length: 20000", body=b"{", secret="alice")
    value = gateway.registry.get_sample_value
    await eventually(lambda: value("expertmesh_gateway_body_bytes") == 20_000)
    for fields in ("Content-Length: 17000", "Transfer-Encoding: chunked"):
        more = await Client.of(gateway)
        await more.post(URL, fields, body=b"", secret="alice")
        if fields.endswith("chunked"):
            more.writer.write(b"4650\r\n" + b" " * 0x4650 + b"\r\n")
        status, body = await more.answer()
        assert (status, body["error"]["code"]) == (429, "work_limit_exceeded")
    small = await gateway.http.post(URL, json={**GOOD, "prompt": 5}, headers=key("alice"))
    assert small.status_code == 400, "a small body needs no room"
    other = await gateway.http.post(URL, content=b"x" * 18_000, headers=key("bob"))
    assert other.status_code == 400, "another tenant has its own part"
    held.writer.close()
    await eventually(lambda: not value("expertmesh_gateway_body_bytes"))
    again = await gateway.http.post(URL, content=b"x" * 20_000, headers=key("alice"))
    assert again.status_code == 400


async def test_a_body_that_comes_in_pieces_takes_room_as_it_grows(start):
    gateway = await start(max_body_bytes=100_000)
    client = await Client.of(gateway)
    await client.post(URL, "Transfer-Encoding: chunked")
    value = gateway.registry.get_sample_value
    for pieces in range(1, 4):
        client.writer.write(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        await client.writer.drain()
        async with asyncio.timeout(LIMIT_S):
            while value("expertmesh_gateway_body_bytes") != (0x2000 * pieces if pieces > 2 else 0):
                await asyncio.sleep(0.001)
    client.writer.write(b"0\r\n\r\n")
    assert (await client.answer())[0] == 400
    assert value("expertmesh_gateway_body_bytes") == 0


async def test_one_key_has_half_of_the_requests_under_way(start, script):
    gateway = await start(store=Keys(), bounds=Bounds(connections=8))
    waiting = [asyncio.create_task(gateway.http.post(URL, json=GOOD, headers=key("alice"))) for _ in range(4)]
    await gateway.queue.wait_for("admitted", 4)
    value = gateway.registry.get_sample_value
    assert value("expertmesh_gateway_posts_in_flight") == 4
    more = await gateway.http.post(URL, json=GOOD, headers=key("alice"))
    assert (more.status_code, more.json()["error"]["code"]) == (429, "work_limit_exceeded")
    assert int(more.headers["retry-after"]) >= 1
    gateway.queue.answer = lambda request: script.events(request, [5])
    assert (await gateway.http.post(URL, json=GOOD, headers=key("bob"))).status_code == 200
    waiting[0].cancel()
    await gateway.queue.wait_for("cancelled")
    await eventually(lambda: value("expertmesh_gateway_posts_in_flight") == 3)
    assert (await gateway.http.post(URL, json=GOOD, headers=key("alice"))).status_code == 200
    for request in gateway.queue.admitted:
        gateway.queue.emit(*script.events(request, [5]))
    for answer in await asyncio.gather(*waiting[1:]):
        assert answer.status_code == 200


async def test_an_answer_of_tokens_has_room_until_it_is_read(start):
    gateway = await start(store=Keys(), max_body_bytes=20_000, body_room=80_000, max_len=100_000)
    body = {"prompt": "a" * 6_000, "return_token_strs": True}
    refused = await gateway.http.post("/tokenize", json=body, headers=key("alice"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "work_limit_exceeded")
    fits = await gateway.http.post("/tokenize", json={**body, "prompt": "a" * 1_000}, headers=key("alice"))
    assert fits.status_code == 200
    assert gateway.registry.get_sample_value("expertmesh_gateway_body_bytes") == 0


async def test_a_long_answer_has_its_room_while_it_waits_in_the_connection(start):
    """7 MB are more than the kernels hold for a client that does not read."""
    gateway = await start(store=Keys(), max_len=100_000)
    body = json.dumps({"prompt": "\u4f60" * 131_072, "return_token_strs": True}, ensure_ascii=False).encode()
    client = await Client.of(gateway)
    await client.post("/tokenize", f"Content-Length: {len(body)}", body=body, secret="alice")
    await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 20)
    client.writer.transport.pause_reading()
    value = gateway.registry.get_sample_value
    await gateway.http.get("/v1/models", headers=key("bob"))  # the loop has turned
    held = value("expertmesh_gateway_body_bytes")
    assert held > 5_000_000
    client.writer.transport.resume_reading()
    answer = json.loads(await client.reader.readexactly(int(held)))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 131_072
    await eventually(lambda: not value("expertmesh_gateway_body_bytes"))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("localhost.:80", 200),
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.5", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json", "/v1/models"])
async def test_without_keys_pages_under_another_name_read_nothing(start, host, status, path):
    """A name that resolves to loopback lets a web page read what is there: DNS rebinding."""
    gateway = await start(same_machine=True)
    answer = await gateway.http.get(path, headers={"Host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),  # what curl -d sends
        (None, 415),
    ],
)
async def test_without_keys_a_body_has_to_be_called_json(start, script, kind, status):
    """A web page may send any other type to any address without asking."""
    gateway = await start(same_machine=True)
    gateway.queue.answer = lambda request: script.events(request, [5])
    headers = {} if kind is None else {"content-type": kind}
    answer = await gateway.http.post(URL, content=json.dumps(GOOD), headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["error"]["code"] == "wrong_content_type"
        assert gateway.queue.admitted == []


async def test_elsewhere_neither_is_asked_for(gateway, script):
    gateway.queue.answer = lambda request: script.events(request, [5])
    answer = await gateway.http.post(URL, content=json.dumps(GOOD), headers={"Host": "any.example"})
    assert answer.status_code == 200


async def test_the_document_needs_a_key_where_all_do_and_loads_nothing_from_elsewhere(start):
    gateway = await start(store=Keys())
    assert (await gateway.http.get("/openapi.json")).status_code == 401
    found = await gateway.http.get("/openapi.json", headers=key("alice"))
    assert found.status_code == 200
    assert "ApiKey" in found.json()["components"]["securitySchemes"]
    for page in ("/docs", "/redoc"):
        assert (await gateway.http.get(page, headers=key("alice"))).status_code == 404


async def test_refusals_are_counted_and_logged_once_for_each_reason(start, caplog):
    gateway = await start(store=Keys(), max_body_bytes=4096)
    gateway.queue.over_rate = RateLimited("Too many.", retry_after_s=1)
    large = json.dumps({"prompt": "x" * 5000}).encode()
    for _ in range(3):
        assert (await gateway.http.post(URL, json=GOOD)).status_code == 401
        assert (await gateway.http.post(URL, json=GOOD, headers=key("limited"))).status_code == 429
        assert (await gateway.http.post(URL, content=large, headers=key("alice") | JSON)).status_code == 413
        assert (await gateway.http.post(URL, json={}, headers=key("alice"))).status_code == 400
    for reason in ("invalid_api_key", "rate_limit_exceeded", "body_too_large"):
        assert gateway.registry.get_sample_value("expertmesh_gateway_refused_total", {"reason": reason}) == 3
    reported = [record.reason for record in caplog.records if hasattr(record, "reason")]
    assert sorted(reported) == ["body_too_large", "invalid_api_key", "rate_limit_exceeded"]
