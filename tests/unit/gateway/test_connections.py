"""Places for connections: who gets one, who gives way, what time means, and what a full gateway still says."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.acceptor import RESERVE, within_descriptors
from services.gateway.connections import Bounds, Connections, Wait
from services.gateway.lived_time import LivedTime
from services.gateway.refusals import Refusals
from services.metrics import GatewayMetrics

GOOD = {"prompt": "hello", "max_tokens": 3}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Guest:
    def __init__(self, name: str) -> None:
        self.name = name
        self.unread = False
        self.paused = False
        self.expired: list[Wait] = []
        self.gave_way: list[Wait] = []

    def expire(self, wait: Wait) -> None:
        self.expired.append(wait)

    def give_way(self, wait: Wait) -> None:
        self.gave_way.append(wait)


class House:
    """:class:`Connections` and a clock of their own."""

    def __init__(self, **bounds: Any) -> None:
        self.registry = CollectorRegistry()
        self.clock = Clock()
        self.places = Connections(Bounds(**bounds), GatewayMetrics(self.registry), "api")
        self.places.time = LivedTime(2 * self.places.bounds.look_s, self.clock)

    def come(self, name: str, wait: Wait | None = Wait.HEAD, seconds: float = 15.0) -> Guest | None:
        spare = self.places.place()
        if spare is None:
            return None
        guest = Guest(name)
        self.places.enter(guest, spare=spare)
        if wait is not None:
            self.places.wait(guest, wait, seconds)
        return guest

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


async def test_answers_hear_a_few_at_a_time_that_their_clients_have_gone() -> None:
    """Thousands that end in one turn of the event loop would hold up every probe."""
    places, heard, turns = House().places, list[int](), [0]
    for number in range(300):
        places.part(partial(heard.append, number))
    while len(heard) < 300:
        await asyncio.sleep(0)
        turns.append(len(heard))
    assert heard == list(range(300))
    assert max(after - before for before, after in pairwise(turns)) <= 32
    places.part(partial(heard.append, 300))
    await asyncio.sleep(0)
    assert heard[-1] == 300


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


def test_who_waits_too_long_is_told_once():
    house = House(look_s=0.5)
    early, late = house.come("early"), house.come("late", seconds=20)
    house.pass_time(14.5)
    assert early.expired == []
    house.pass_time(1)
    assert (early.expired, late.expired) == ([Wait.HEAD], [])
    house.places.done(late, Wait.HEAD)
    house.pass_time(30)
    assert (early.expired, late.expired) == ([Wait.HEAD], [])


@pytest.mark.parametrize("wait", [Wait.HEAD, Wait.BODY, Wait.REST, Wait.IDLE, Wait.STALL, Wait.LINGER])
def test_nobody_is_late_because_this_process_stood_still(wait):
    house = House(look_s=0.5)
    guest = house.come("g", wait, 15)
    house.pass_time(10)
    for _ in range(4):
        house.stand_still(30)
    assert guest.expired == []
    house.pass_time(2)
    assert guest.expired == [wait]


def test_few_hundred_end_in_one_turn_of_the_loop():
    house = House(look_s=0.5)
    guests = [house.come(f"{number}") for number in range(600)]
    house.places.wait(guests[0], Wait.BODY, 15)
    house.pass_time(14.5)
    house.clock.now += 1
    ended = []
    while house.places.look():
        ended.append(sum(len(guest.expired) for guest in guests))
    assert ended == [256, 512]
    assert [len(guest.expired) for guest in guests] == [2] + [1] * 599
    assert not house.places.look()


def test_what_has_come_and_is_not_read_was_in_time_once():
    house = House(look_s=0.5)
    guest = house.come("g")
    guest.unread = True
    house.pass_time(15)
    assert guest.expired == []
    house.pass_time(1)
    assert guest.expired == [Wait.HEAD], "one more look, not one after the other"


def test_a_body_that_we_do_not_read_is_not_late():
    house = House(look_s=0.5)
    guest = house.come("g", Wait.BODY)
    guest.paused = True
    house.pass_time(100)
    assert guest.expired == []
    guest.paused = False
    house.pass_time(1)
    assert guest.expired == [Wait.BODY]


def test_those_who_are_not_served_give_way_the_oldest_first():
    house = House(connections=4, spare=1)
    idle = house.come("idle", Wait.IDLE)
    served = house.come("served", None)
    half = [house.come("half"), house.come("half")]
    for gone in (*half, idle):  # first those who have not said what they want
        assert gone.gave_way == []
        assert house.come("new", None) is not None
        assert len(gone.gave_way) == 1
    assert served.gave_way == []
    assert not house.places._spare
    spare = house.come("probe", Wait.HEAD)
    assert house.places._spare == {spare}
    another = house.come("probe", None)
    assert (spare.gave_way, house.places._spare) == ([Wait.HEAD], {another})
    assert house.come("too many") is None
    assert house.value("refused_total", reason="full") == 1
    assert house.value("refused_total", reason="gave_way_head") == 3
    house.places.leave(served)
    assert house.come("fits", None) is not None
    assert not house.places._spare - {another}


def test_those_who_are_told_already_give_way_before_all_others():
    house = House(connections=4, spare=0)
    guests = [house.come("g", wait) for wait in (Wait.IDLE, Wait.REST, Wait.HEAD, Wait.LINGER)]
    for guest in reversed(guests):
        assert guest.gave_way == []
        assert house.come("new", None) is not None
        assert len(guest.gave_way) == 1


def test_whose_request_is_in_the_socket_does_not_give_way():
    house = House(connections=2, spare=0)
    just_came, waits = house.come("just came"), house.come("waits")
    just_came.unread = True
    assert house.come("new", None) is not None
    assert (just_came.gave_way, waits.gave_way) == ([], [Wait.HEAD])


def test_places_are_counted_from_the_moment_of_the_accept():
    house = House(connections=2, spare=1)
    assert [house.places.place() for _ in range(4)] == [False, False, True, None]
    house.places.vacate(spare=False)
    assert house.places.place() is False
    house.places.vacate(spare=True)
    assert house.places.place() is True


def test_the_gauges_say_what_they_wait_for():
    house = House(connections=10)
    for wait in (Wait.HEAD, Wait.HEAD, Wait.BODY, Wait.IDLE, None):
        house.come("g", wait)
    house.pass_time(0.5)
    states = {state: house.value("connections", listener="api", state=state) for state in ("head", "body", "idle")}
    assert states == {"head": 2, "body": 1, "idle": 1}
    assert house.value("connections", listener="api", state="served") == 1


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
        "refused a head (999 more since this was said last)",
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


class Door:
    """Connections to a gateway, kept until the end of the test."""

    def __init__(self, gateway: Any) -> None:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self.kept: list[asyncio.StreamWriter] = []

    async def open(self, sent: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*self._address)
        self.kept.append(writer)
        writer.write(sent)
        return reader

    async def ask(self, sent: bytes) -> bytes:
        reader = await self.open(sent)
        try:
            async with asyncio.timeout(20):
                return await reader.read(65536)
        except ConnectionError:
            return b""


def _post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


async def test_a_full_gateway_says_how_it_is_and_that_it_is_full(start):
    gateway = await start(bounds=Bounds(connections=3, spare=2, look_s=0.05, spare_head_s=0.3))
    await gateway.http.aclose()
    door = Door(gateway)
    for _ in range(3):
        await door.open(_post(GOOD))
    await gateway.queue.wait_for("admitted", 3)
    for path in ("/health", "/ready", "/accepting", "/metrics"):
        answer = await door.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert answer.split()[1] in (b"200", b"503"), answer
        assert b"connection: close" in answer
        assert b"overloaded" not in answer
    for sent in (_post(GOOD), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"):
        answer = await door.ask(sent)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 2" in answer
        assert b'"code":"overloaded"' in answer
    assert len(gateway.queue.admitted) == 3
    silent = await door.open(b"GET /hea")
    assert (await asyncio.wait_for(silent.read(), 20)).startswith(b"HTTP/1.1 408 ")
    for writer in door.kept:
        writer.transport.abort()


async def test_half_open_connections_keep_nobody_out(start, script):
    gateway = await start(bounds=Bounds(connections=20, spare=4, look_s=0.05))
    gateway.queue.answer = lambda request: script.events(request, [5])
    door = Door(gateway)
    for _ in range(300):
        await door.open(b"GET /health HTTP/1.1\r\nHost: loc")
    for _ in range(5):
        answer = await door.ask(_post(GOOD))
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert (await door.ask(HEALTH)).startswith(b"HTTP/1.1 200 ")
    assert len(list(gateway.server._open())) <= 24
    for writer in door.kept:
        writer.transport.abort()


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
    assert (await Door(gateway).ask(HEALTH)).startswith(b"HTTP/1.1 200 ")
    assert not failures
    assert gateway.registry.get_sample_value("expertmesh_gateway_refused_total", {"reason": "accept"}) == 3
    monkeypatch.undo()


async def test_a_connection_that_breaks_before_it_is_open_gives_its_place_back(start, monkeypatch):
    gateway = await start(bounds=Bounds(connections=2, spare=0, look_s=0.05))
    acceptor = gateway.server._server.servers[0]

    async def broken(*_: Any) -> None:
        raise OSError("it has gone")

    with monkeypatch.context() as patch:
        patch.setattr(acceptor._loop, "connect_accepted_socket", broken)
        for _ in range(5):
            assert await Door(gateway).ask(HEALTH) == b""
    assert (await Door(gateway).ask(HEALTH)).startswith(b"HTTP/1.1 200 ")


def test_free_places_are_counted_with_those_on_their_way() -> None:
    house = House(connections=3, spare=1)
    assert house.places.free == 3
    guest = house.come("first")
    assert house.places.place() is False
    assert house.places.free == 1
    house.places.vacate(spare=False)
    house.places.leave(guest)
    assert house.places.free == 3
    for name in ("first", "second", "third"):
        house.come(name, None)
    assert house.places.place() is True
    assert house.places.free == 0, "a spare place is none of them"
