"""A gateway's process against people who mean harm: nobody needs a key for any of this, and no worker has to run."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from testkit.pocket.answers import POCKET
from testkit.processes.hostile_bodies import hostile_bodies
from testkit.processes.servers import Bench, Server, bench, flags, free_port
from testkit.waiting import until

pytestmark = pytest.mark.alone

MIB = 1 << 20
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
FLOOD = 52_000_000


class Gateway(Server):
    """One without workers, and what it takes."""

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", httpx.URL(self.url).port or 0), timeout=30)
        client.settimeout(30)
        return client

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.proc.pid)

    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def start(stage: Bench, *, descriptors: int | None = None) -> Gateway:
    redis_port, port = free_port(), free_port()
    stage.redis(port=redis_port)
    options = flags(model=POCKET / "model", redis_url=f"redis://127.0.0.1:{redis_port}/0", port=port)
    command = [sys.executable, "-m", "services.gateway", *options]
    if descriptors is not None:
        command = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command]
    gateway = Gateway(url=f"http://127.0.0.1:{port}", proc=stage.start("gateway", command))

    def accepts() -> bool:
        assert gateway.proc.popen.poll() is None, gateway.proc.log()[-4000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{gateway.url}/accepting", timeout=5).status_code == 200
        return False

    until(accepts, "/accepting answers 200", limit_s=120)
    return gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with bench(tmp_path_factory.mktemp("front-door")) as stage:
        running = start(stage)
        httpx.post(f"{running.url}/v1/completions", json={"prompt": 5})  # what a first request loads
        yield running


class Watch:
    """Looks at memory every few milliseconds, and asks on new connections how the gateway is."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self.base = self.peak = gateway.memory()
        self.slowest_s = 0.0
        self.asked = 0
        self.failed: list[str] = []

    def __enter__(self) -> Watch:
        self._watching = [self._pool.submit(self._look), self._pool.submit(self._ask)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for watching in self._watching:
            watching.result()

    @property
    def grown(self) -> int:
        return self.peak - self.base

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, self._gateway.memory())

    def _ask(self) -> None:
        while not self._over.wait(0.05):
            began = time.monotonic()
            self.asked += 1
            try:
                with self._gateway.connect() as client:
                    client.sendall(HEALTH)
                    assert _status(client) == 200
            except (OSError, AssertionError) as error:
                self.failed.append(repr(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)


BODIES = hostile_bodies()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_4_mib_is_refused_for_little(gateway, name):
    """Processor time, because how long it takes says how busy the machine is: what once took 5 to 60 s of it."""
    path, raw, _ = BODIES[name]
    cpu_s = gateway.cpu_s()
    with Watch(gateway) as watch:
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{gateway.url}{path}", content=raw, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert gateway.cpu_s() - cpu_s < 1
    assert watch.grown < 100 * MIB
    assert watch.failed == []


def _flood(client: socket.socket, first: bytes, piece: bytes) -> int:
    """Sends up to FLOOD bytes; how many went out."""
    sent = len(first)
    with contextlib.suppress(OSError):
        client.sendall(first)
        while sent < FLOOD:
            client.sendall(piece)
            sent += len(piece)
    return sent


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HEALTH[:-2], b"a:b\r\n" * 10_000),
        (b"GET /", b"u" * 65_536),
        (HEALTH[:-2] + b"x: ", b"v" * 65_536),
        (b"", b"\r\n" * 30_000),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a:b\r\n" * 10_000),
        (CHUNKED + b"2;", b"e" * 65_536),
        (CHUNKED, b"1\r\nx\r\n" * 10_000),
        (CHUNKED, b"10000\r\n" + b" " * 65_536 + b"\r\n"),
        (b"", HEALTH * 1_000),
    ],
    ids=["lines", "url", "value", "empty lines", "trailers", "extension", "chunks of 1", "body", "ahead"],
)
def test_what_anybody_sends_without_an_end_is_kept_nowhere(gateway, first, piece):
    with Watch(gateway) as watch, gateway.connect() as client:
        _flood(client, first, piece)
        with contextlib.suppress(OSError):
            client.recv(65_536)
    assert watch.grown < 5 * MIB
    assert watch.failed == []


@contextlib.contextmanager
def _descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"this process may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _ended(gateway: Gateway) -> tuple[float, float]:
    """Connections whose head did not come, and those that gave way before."""
    name = "expertmesh_gateway_refused_total"
    return gateway.metric(name, reason="head_late"), gateway.metric(name, reason="gave_way_head")


@pytest.mark.parametrize("descriptors", [None, 300])
def test_thousands_that_never_say_what_they_want_keep_nobody_out(tmp_path, descriptors):
    with _descriptors(3_500), bench(tmp_path) as stage, contextlib.ExitStack() as kept:
        gateway = start(stage, descriptors=descriptors)
        with Watch(gateway) as watch:
            for _ in range(3_000):
                kept.enter_context(gateway.connect()).sendall(HEALTH[:-6])

            assert httpx.post(f"{gateway.url}/v1/completions", json={"prompt": 5}).status_code == 400
            until(lambda: sum(_ended(gateway)) >= 3_000, "those that wait are gone", limit_s=15 + 45, every_s=0.5)
        assert watch.failed == []
        assert watch.asked > 20
        assert watch.grown < 64 * MIB
        assert (_ended(gateway)[1] > 0) == (descriptors is not None)
        until(lambda: gateway.process.num_fds() < 60, "their descriptors are free", every_s=0.5)
        if descriptors is not None:
            assert "ulimit -n" in gateway.proc.log()
        assert gateway.proc.log().count("head_late") < 20


def _status(client: socket.socket) -> int:
    """Of the next answer, a small JSON object, which is read whole."""
    answer = b""
    while not answer.endswith(b"}"):
        piece = client.recv(4096)
        assert piece, "the connection was closed"
        answer += piece
    return int(answer.split()[1])


def _resumes(gateway: Gateway, seconds: float, meanwhile: Callable[[], None]) -> None:
    gateway.proc.popen.send_signal(signal.SIGSTOP)
    meanwhile()
    time.sleep(seconds)
    gateway.proc.popen.send_signal(signal.SIGCONT)


def test_nobody_is_late_because_the_gateway_was_stopped(gateway):
    """For longer than a head may take; what was to come had come meanwhile."""
    raw = b'{"prompt": 5}'
    post = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 13")
    with contextlib.ExitStack() as stack:
        heads, bodies, resting = [[stack.enter_context(gateway.connect()) for _ in range(20)] for _ in range(3)]
        for client in heads:
            client.sendall(HEALTH[:-2])
        for client in bodies:
            client.sendall(post + raw[:5])
        for client in resting:
            client.sendall(HEALTH)
            assert _status(client) == 200

        def the_rest() -> None:
            for client in heads:
                client.sendall(HEALTH[-2:])
            for client in bodies:
                client.sendall(raw[5:])
            for client in resting:
                client.sendall(HEALTH)

        _resumes(gateway, 20, the_rest)
        for clients, status in ((heads, 200), (bodies, 400), (resting, 200)):
            assert [_status(client) for client in clients] == [status] * 20
