"""Who may ask, in which order that is found out, and how much of a tenant's is under way at a time."""

from __future__ import annotations

import asyncio
import json

import pytest
from testkit.http_peer import URL, bearer, head, post
from testkit.waiting import eventually

from services.errors import Overloaded, RateLimited, WorkLimited
from services.gateway.connections import Bounds
from services.gateway.guard import Room

GOOD = {"prompt": "hello", "max_tokens": 3}
POSTS = (URL, "/v1/chat/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}


TENANTS = ("alice", "bob", "limited")


@pytest.mark.parametrize("path", POSTS)
async def test_nothing_of_a_body_is_waited_for_where_less_refuses_it(start, path):
    """Each has declared a body and sent nothing of it."""
    gateway = await start(tenants=TENANTS, max_body_bytes=4096)

    async def refusal(*fields: str) -> tuple[int, str]:
        status, body = await (await gateway.connect(head(*fields, path=path))).said()
        return status, body["error"]["code"]

    large = ("Authorization: Bearer limited", "Content-Length: 4097")
    assert await refusal("Content-Length: 4096") == (401, "invalid_api_key")
    assert await refusal(*large) == (413, "body_too_large")
    assert gateway.queue.charged == ["limited"], "a body that is refused costs of the rate, too"
    gateway.queue.over_rate = RateLimited("Too many.", retry_after_s=3)
    assert await refusal(*large) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("path", POSTS)
async def test_every_post_costs_of_the_rate_whatever_is_in_it(start, path):
    gateway = await start(tenants=TENANTS)
    for content in (b"{", b"{}", b'{"prompt": 5, "tokens": 5, "messages": 5}'):
        assert (await gateway.http.post(path, content=content, headers=bearer("limited"))).status_code == 400
    assert gateway.queue.charged == ["limited"] * 3
    await gateway.http.post(path, content=b"{", headers=bearer("alice"))
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
    gateway = await start(tenants=TENANTS, max_body_bytes=20_000, body_room=80_000)
    alice = "Authorization: Bearer alice"
    held = await gateway.connect(head(alice, "Content-Length: 20000") + b"{")
    await eventually(lambda: gateway.value("gateway_body_bytes") == 20_000)
    chunk = b"4650\r\n" + b" " * 0x4650 + b"\r\n"
    for sent in (head(alice, "Content-Length: 17000"), head(alice, "Transfer-Encoding: chunked") + chunk):
        status, body = await (await gateway.connect(sent)).said()
        assert (status, body["error"]["code"]) == (429, "work_limit_exceeded")
    small = await gateway.http.post(URL, json={**GOOD, "prompt": 5}, headers=bearer("alice"))
    assert small.status_code == 400, "a small body needs no room"
    other = await gateway.http.post(URL, content=b"x" * 18_000, headers=bearer("bob"))
    assert other.status_code == 400, "another tenant has its own part"
    held.writer.close()
    await eventually(lambda: not gateway.value("gateway_body_bytes"))
    again = await gateway.http.post(URL, content=b"x" * 20_000, headers=bearer("alice"))
    assert again.status_code == 400


async def test_a_body_that_comes_in_pieces_takes_room_as_it_grows(start):
    gateway = await start(max_body_bytes=100_000)
    client = await gateway.connect(head("Transfer-Encoding: chunked"))
    for held in (0, 0, 3 * 0x2000):  # a small body needs no room
        await client.send(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        await eventually(lambda: gateway.value("gateway_body_bytes") == held)  # noqa: B023 - waited for at once
    await client.send(b"0\r\n\r\n")
    assert (await client.said())[0] == 400
    assert gateway.value("gateway_body_bytes") == 0


async def test_one_key_has_half_of_the_requests_under_way(start, script):
    gateway = await start(tenants=TENANTS, bounds=Bounds(connections=8))
    waiting = [(await gateway.ask(tenant="alice"))[0] for _ in range(4)]
    assert gateway.value("gateway_posts_in_flight") == 4
    more = await gateway.post(tenant="alice")
    assert (more.status_code, more.json()["error"]["code"]) == (429, "work_limit_exceeded")
    assert int(more.headers["retry-after"]) >= 1
    gateway.says([5])
    assert (await gateway.post(tenant="bob")).status_code == 200
    waiting[0].cancel()
    await gateway.queue.wait_for("cancelled")
    await eventually(lambda: gateway.value("gateway_posts_in_flight") == 3)
    assert (await gateway.post(tenant="alice")).status_code == 200
    for request in gateway.queue.admitted:
        gateway.queue.emit(*script.events(request, [5]))
    assert [answer.status_code for answer in await asyncio.gather(*waiting[1:])] == [200] * 3


async def test_an_answer_of_tokens_has_room_until_it_is_read(start):
    gateway = await start(tenants=TENANTS, max_body_bytes=20_000, body_room=80_000, max_len=100_000)
    body = {"prompt": "a" * 6_000, "return_token_strs": True}
    refused = await gateway.http.post("/tokenize", json=body, headers=bearer("alice"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "work_limit_exceeded")
    fits = await gateway.http.post("/tokenize", json={**body, "prompt": "a" * 1_000}, headers=bearer("alice"))
    assert fits.status_code == 200
    assert gateway.value("gateway_body_bytes") == 0


async def test_a_long_answer_has_its_room_while_it_waits_in_the_connection(start):
    """7 MB are more than the kernels hold for a client that does not read."""
    gateway = await start(tenants=TENANTS, max_len=100_000)
    body = json.dumps({"prompt": "\u4f60" * 131_072, "return_token_strs": True}, ensure_ascii=False).encode()
    client = await gateway.connect(post(body, "Authorization: Bearer alice", path="/tokenize"))
    await client.until(b"\r\n\r\n")
    client.writer.transport.pause_reading()
    await gateway.http.get("/v1/models", headers=bearer("bob"))  # the loop has turned
    held = gateway.value("gateway_body_bytes")
    assert held > 5_000_000
    client.writer.transport.resume_reading()
    answer = json.loads(await client.reader.readexactly(int(held)))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 131_072
    await eventually(lambda: not gateway.value("gateway_body_bytes"))


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json", "/v1/models"])
async def test_without_keys_pages_under_another_name_read_nothing(start, path):
    """A name that resolves to loopback lets a web page read what is there: DNS rebinding."""
    gateway = await start(same_machine=True)
    for host in ("localhost", "LocalHost:8000", "localhost.:80", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"):
        assert (await gateway.http.get(path, headers={"Host": host})).status_code == 200, host
    others = ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.5", "[::2]", ""]
    for host in others:
        answer = await gateway.http.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), host


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
async def test_without_keys_a_body_has_to_be_called_json(start, kind, status):
    """A web page may send any other type to any address without asking."""
    gateway = await start(same_machine=True)
    gateway.says([5])
    headers = {} if kind is None else {"content-type": kind}
    answer = await gateway.http.post(URL, content=json.dumps(GOOD), headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["error"]["code"] == "wrong_content_type"
        assert gateway.queue.admitted == []
    elsewhere = await start()
    elsewhere.says([5])
    headers["Host"] = "any.example"
    assert (await elsewhere.http.post(URL, content=json.dumps(GOOD), headers=headers)).status_code == 200


async def test_the_document_needs_a_key_where_all_do(start):
    gateway = await start(tenants=TENANTS)
    assert (await gateway.http.get("/openapi.json")).status_code == 401
    found = await gateway.http.get("/openapi.json", headers=bearer("alice"))
    assert found.status_code == 200
    assert "ApiKey" in found.json()["components"]["securitySchemes"]
    page = await gateway.http.get("/docs")
    assert page.status_code == 200, "browsers send no key"
    assert found.json()["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"][0] not in page.text
    assert (await gateway.http.get("/redoc", headers=bearer("alice"))).status_code == 404


async def test_refusals_are_counted_and_logged_once_for_each_reason(start, caplog):
    gateway = await start(tenants=TENANTS, max_body_bytes=4096)
    gateway.queue.over_rate = RateLimited("Too many.", retry_after_s=1)
    large = json.dumps({"prompt": "x" * 5000}).encode()
    for _ in range(3):
        assert (await gateway.http.post(URL, json=GOOD)).status_code == 401
        assert (await gateway.http.post(URL, json=GOOD, headers=bearer("limited"))).status_code == 429
        assert (await gateway.http.post(URL, content=large, headers=bearer("alice") | JSON)).status_code == 413
        assert (await gateway.http.post(URL, json={}, headers=bearer("alice"))).status_code == 400
    for reason in ("invalid_api_key", "rate_limit_exceeded", "body_too_large"):
        assert gateway.refused(reason) == 3
    reported = [record.reason for record in caplog.records if hasattr(record, "reason")]
    assert sorted(reported) == ["body_too_large", "invalid_api_key", "rate_limit_exceeded"]
