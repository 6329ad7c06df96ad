"""Places for connections: who gets one, who gives way, what time means, and what a full gateway still says."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from testkit.http_peer import HEALTH, head, post

from services.gateway.acceptor import RESERVE, within_descriptors
from services.gateway.connections import Bounds, Connections, Wait
from services.gateway.lived_time import LivedTime
from services.gateway.refusals import Refusals
from services.metrics import GatewayMetrics

GOOD = {"prompt": "hello", "max_tokens": 3}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Client:
    def __init__(self, name: str) -> None:
        self.name = name
        self.unread = False
        self.paused = False
        self.expired: list[Wait] = []
        self.gave_way = 0

    def expire(self, wait: Wait) -> None:
        self.expired.append(wait)

    def give_way(self) -> None:
        self.gave_way += 1


class Listener:
    """:class:`Connections` and a clock of their own."""

    def __init__(self, **bounds: Any) -> None:
        self.registry = CollectorRegistry()
        self.clock = Clock()
        self.places = Connections(Bounds(**bounds), GatewayMetrics(self.registry), "api")
        self.places.time = LivedTime(2 * self.places.bounds.look_s, self.clock)

    def come(self, name: str, wait: Wait | None = Wait.HEAD, seconds: float = 15.0) -> Client | None:
        spare = self.places.place()
        if spare is None:
            return None
        client = Client(name)
        self.places.enter(client, spare=spare)
        if wait is not None:
            self.places.wait(client, wait, seconds)
        return client

    def pass_time(self, seconds: float) -> None:
        """While the loop turns as it should."""
        step = self.places.bounds.look_s
        for _ in range(round(seconds / step)):
            self.clock.now += step
            self.places.look()

    def stand_still(self, seconds: float) -> None:
        self.clock.now += seconds
        self.places.look()

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"expertmesh_gateway_{name}", labels) or 0.0


async def test_answers_are_notified_a_few_at_a_time_that_their_clients_have_gone() -> None:
    """Thousands that end in one turn of the event loop would hold up every probe."""
    places, notified, turns = Listener().places, list[int](), [0]
    for number in range(300):
        places.notify_soon(partial(notified.append, number))
    while len(notified) < 300:
        await asyncio.sleep(0)
        turns.append(len(notified))
    assert notified == list(range(300))
    assert max(after - before for before, after in pairwise(turns)) <= 32
    places.notify_soon(partial(notified.append, 300))
    await asyncio.sleep(0)
    assert notified[-1] == 300


def test_time_that_was_not_lived_does_not_count():
    clock = Clock()
    lived = LivedTime(1.0, clock)
    clock.now += 0.5
    assert lived.now() == lived.tick() == 0.5
    clock.now += 30
    assert lived.now() == 1.5
    assert lived.tick() == 1.5
    clock.now += 0.25
    assert lived.tick() == 1.75


def test_a_wait_that_is_too_long_ends_once():
    listener = Listener(look_s=0.5)
    early, late = listener.come("early"), listener.come("late", seconds=20)
    listener.pass_time(14.5)
    assert early.expired == []
    listener.pass_time(1)
    assert (early.expired, late.expired) == ([Wait.HEAD], [])
    listener.places.done(late, Wait.HEAD)
    listener.pass_time(30)
    assert (early.expired, late.expired) == ([Wait.HEAD], [])


@pytest.mark.parametrize("wait", [Wait.HEAD, Wait.BODY, Wait.REST, Wait.IDLE, Wait.STALL, Wait.CLOSING])
def test_nobody_is_late_because_this_process_stood_still(wait):
    listener = Listener(look_s=0.5)
    client = listener.come("g", wait, 15)
    listener.pass_time(10)
    for _ in range(4):
        listener.stand_still(30)
    assert client.expired == []
    listener.pass_time(2)
    assert client.expired == [wait]


def test_few_hundred_end_in_one_turn_of_the_loop():
    listener = Listener(look_s=0.5)
    clients = [listener.come(f"{number}") for number in range(600)]
    listener.places.wait(clients[0], Wait.BODY, 15)
    listener.pass_time(14.5)
    listener.clock.now += 1
    ended = []
    while listener.places.look():
        ended.append(sum(len(client.expired) for client in clients))
    assert ended == [256, 512]
    assert [len(client.expired) for client in clients] == [2] + [1] * 599
    assert not listener.places.look()


def test_what_has_come_and_is_not_read_was_in_time_once():
    listener = Listener(look_s=0.5)
    client = listener.come("g")
    client.unread = True
    listener.pass_time(15)
    assert client.expired == []
    listener.pass_time(1)
    assert client.expired == [Wait.HEAD], "one more look, not one after the other"


def test_a_body_that_we_do_not_read_is_not_late():
    listener = Listener(look_s=0.5)
    client = listener.come("g", Wait.BODY)
    client.paused = True
    listener.pass_time(100)
    assert client.expired == []
    client.paused = False
    listener.pass_time(1)
    assert client.expired == [Wait.BODY]


def test_those_who_are_not_served_give_way_the_oldest_first():
    listener = Listener(connections=4, spare=1)
    idle = listener.come("idle", Wait.IDLE)
    served = listener.come("served", None)
    half = [listener.come("half"), listener.come("half")]
    for gone in (*half, idle):  # first those who have not said what they want
        assert gone.gave_way == 0
        assert listener.come("new", None) is not None
        assert gone.gave_way == 1
    assert served.gave_way == 0
    assert not listener.places._spare
    spare = listener.come("probe", Wait.HEAD)
    assert listener.places._spare == {spare}
    another = listener.come("probe", None)
    assert (spare.gave_way, listener.places._spare) == (1, {another})
    assert listener.come("too many") is None
    assert listener.value("refused_total", reason="full") == 1
    assert listener.value("refused_total", reason="gave_way_head") == 3
    listener.places.leave(served)
    assert listener.places.free == 1
    assert listener.come("fits", None) is not None
    assert not listener.places._spare - {another}


def test_connections_that_close_give_way_before_all_others():
    listener = Listener(connections=4, spare=0)
    clients = [listener.come("g", wait) for wait in (Wait.IDLE, Wait.REST, Wait.HEAD, Wait.CLOSING)]
    for client in reversed(clients):
        assert client.gave_way == 0
        assert listener.come("new", None) is not None
        assert client.gave_way == 1


def test_whose_request_is_in_the_socket_does_not_give_way():
    listener = Listener(connections=2, spare=0)
    just_came, waits = listener.come("just came"), listener.come("waits")
    just_came.unread = True
    assert listener.come("new", None) is not None
    assert (just_came.gave_way, waits.gave_way) == (0, 1)


def test_places_are_counted_from_the_moment_of_the_accept():
    places = Listener(connections=2, spare=1).places
    assert [(places.place(), places.free) for _ in range(4)] == [(False, 1), (False, 0), (True, 0), (None, 0)]
    places.vacate(spare=False)
    assert (places.free, places.place()) == (1, False)
    places.vacate(spare=True)
    assert (places.free, places.place()) == (0, True), "a spare place is none of those that are free"


def test_the_gauges_say_what_they_wait_for():
    listener = Listener(connections=10)
    for wait in (Wait.HEAD, Wait.HEAD, Wait.BODY, Wait.IDLE, None):
        listener.come("g", wait)
    listener.pass_time(0.5)
    states = {state: listener.value("connections", listener="api", state=state) for state in ("head", "body", "idle")}
    assert states == {"head": 2, "body": 1, "idle": 1}
    assert listener.value("connections", listener="api", state="served") == 1


def test_a_flood_fills_no_log(caplog):
    clock = Clock()
    registry = CollectorRegistry()
    refusals = Refusals(GatewayMetrics(registry), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.note("head_bytes", "refused a head")
        refusals.note("full", "closed one")
        clock.now += 10
        refusals.note("head_bytes", "refused a head")
    assert [record.message for record in caplog.records] == [
        "refused a head",
        "closed one",
        "refused a head (999 more since the last such line)",
    ]
    assert registry.get_sample_value("expertmesh_gateway_refused_total", {"reason": "head_bytes"}) == 1001


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A soft limit below what the test asks for; the hard one is above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, RESERVE + 20), hard))
    yield max(256, RESERVE + 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_on_descriptors_is_raised_as_far_as_is_needed(few_descriptors):
    bounds = Bounds(connections=few_descriptors, spare=8)
    assert within_descriptors(bounds) == bounds
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_descriptors + 8 + RESERVE


def test_what_the_hard_limit_does_not_allow_is_said_and_not_tried(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        bounds = within_descriptors(Bounds())
    assert bounds.connections + bounds.spare + RESERVE <= 300
    assert bounds.spare >= 1
    assert "ulimit -n" in caplog.text


async def test_a_full_gateway_says_how_it_is_and_that_it_is_full(start):
    gateway = await start(bounds=Bounds(connections=3, spare=2, look_s=0.05, spare_head_s=0.3))
    await gateway.http.aclose()
    for _ in range(3):
        await gateway.connect(post(GOOD))
    await gateway.queue.wait_for("admitted", 3)
    for path in ("/health", "/ready", "/accepting", "/metrics"):
        answer = await (await gateway.connect(head(path=path, method="GET"))).all()
        assert answer.split()[1] in (b"200", b"503"), answer
        assert b"connection: close" in answer
        assert b"overloaded" not in answer
    for sent in (post(GOOD), head(path="/v1/models", method="GET")):
        answer = await (await gateway.connect(sent)).all()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 2" in answer
        assert b'"code":"overloaded"' in answer
    assert len(gateway.queue.admitted) == 3
    silent = await gateway.connect(b"GET /hea")
    assert (await silent.all()).startswith(b"HTTP/1.1 408 ")


async def test_half_open_connections_keep_nobody_out(start):
    gateway = await start(bounds=Bounds(connections=20, spare=4, look_s=0.05))
    gateway.says([5])
    for _ in range(300):
        await gateway.connect(HEALTH[:30])
    for sent in (post(GOOD), HEALTH) * 5:
        assert (await (await gateway.connect(sent)).answer()).startswith(b"HTTP/1.1 200 ")
    assert len(list(gateway.server._open())) <= 24


async def test_a_listener_without_descriptors_waits_and_goes_on(start, monkeypatch):
    gateway = await start()
    acceptor = gateway.server._server.servers[0]
    accept, failures = acceptor._listener.accept, [OSError(24, "Too many open files")] * 3

    class Listener:
        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return accept()

    listener = acceptor._listener
    monkeypatch.setattr(acceptor, "_listener", Listener())
    monkeypatch.setattr("services.gateway.acceptor._PAUSE_S", 0.01)
    acceptor._loop.remove_reader(listener)
    acceptor._listen()
    assert (await (await gateway.connect(HEALTH)).said())[0] == 200
    assert not failures
    assert gateway.refused("accept") == 3
    monkeypatch.undo()


async def test_a_connection_that_breaks_before_it_is_open_gives_its_place_back(start, monkeypatch):
    gateway = await start(bounds=Bounds(connections=2, spare=0, look_s=0.05))
    acceptor = gateway.server._server.servers[0]

    async def broken(*_: Any) -> None:
        raise OSError("it has gone")

    with monkeypatch.context() as patch:
        patch.setattr(acceptor._loop, "connect_accepted_socket", broken)
        for _ in range(5):
            assert await (await gateway.connect(HEALTH)).all() == b""
    assert (await (await gateway.connect(HEALTH)).said())[0] == 200
