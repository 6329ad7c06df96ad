"""What every ExpertLink with replicas promises: right sums while replicas join, leave and die; a typed error in time.

An implementation joins by one entry in ``IMPLEMENTATIONS``; those between GPUs, where a kill is a kill -9 of a process,
run where there are GPUs (``make gpu-test``).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.fabric.replicas import GPU_KINDS, KINDS, GpuSeats, Seats, Server, ThreadSeats
from testkit.fabric.tcp import FAST, SECRET, hello, scaled, seat_of, table_of
from testkit.waiting import LIMIT_S, until
from torch import Tensor

from services.errors import ExpertUnavailable
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import Echo, Kind, Limits, frame_parts, message_of, read_frame
from services.fabric.tcp.stream import Stream
from services.routing import RoutingTable, Seat, even_groups

EXPERTS, GROUPS = 8, 2
CUT = even_groups([0], EXPERTS, GROUPS)
CHANGES = 30
JOIN_S = 60.0
KILL_S = 0.5
ALL = {0: range(EXPERTS)}


@pytest.fixture(params=KINDS)
def seats(request: pytest.FixtureRequest) -> Seats:
    """Servers in threads of this process."""
    return ThreadSeats(KINDS[request.param])


BETWEEN_GPUS = [
    pytest.param((kind, gpus), marks=pytest.mark.gpu, id=f"{kind}-{gpus}-gpus") for gpus in (2, 4) for kind in GPU_KINDS
]


@pytest.fixture(params=[*KINDS, *BETWEEN_GPUS])
def all_seats(request: pytest.FixtureRequest) -> Seats:
    """In threads, or between GPUs in processes."""
    if isinstance(request.param, str):
        return ThreadSeats(KINDS[request.param])
    kind, gpus = request.param
    return GpuSeats(request.getfixturevalue("gpu_pools")(gpus), GPU_KINDS[kind])


class Cluster:
    """Servers behind one link: each change is announced, or not, as a scheduler would."""

    def __init__(self, seats: Seats) -> None:
        self.servers: dict[int, tuple[int, Server]] = {}
        self._seats = seats
        self.epoch = 0
        self.link: Any = None
        for group in range(GROUPS):
            for _ in range(2):
                self.join(group)

    def table(self) -> RoutingTable:
        self.epoch += 1
        seats = [seat_of(server, number, group) for number, (group, server) in self.servers.items()]
        return table_of(*seats, groups=CUT, epoch=self.epoch)

    def join(self, group: int) -> None:
        number, server = self._seats.serve(CUT[group].experts, group)
        self.servers[number] = group, server
        self._announce()
        if self.link is not None:
            until(lambda: number in self.link.usable(), "the newcomer is usable", every_s=0.002)

    def leave(self, number: int) -> None:
        _, server = self.servers.pop(number)
        self._announce()
        assert server.drain(LIMIT_S)

    def kill(self, number: int) -> None:
        """It is announced later, if at all: with the next change."""
        self.servers.pop(number)[1].kill()

    def replicas(self, group: int) -> list[int]:
        return [number for number, (of, _) in self.servers.items() if of == group]

    def _announce(self) -> None:
        if self.link is not None:
            self.link.apply(self.table())

    def change(self, draw: random.Random) -> None:
        group = draw.randrange(GROUPS)
        replicas = self.replicas(group)
        if len(replicas) == 1:
            self.join(group)
        else:
            draw.choice([self.kill, self.leave])(draw.choice(replicas))

    def close(self) -> None:
        for _, server in self.servers.values():
            server.close()


class Load(threading.Thread):
    """Dispatches, two handles at a time, until it has to stop; holds every sum against what it must be."""

    def __init__(self, link: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.done, self.stop, self.error = threading.Semaphore(0), threading.Event(), None
        self._link, self._torch = link, torch.Generator().manual_seed(seed)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                handles = [self._dispatch() for _ in range(2)]
                for expected_TD, handle in reversed(handles):
                    assert torch.equal(self._link.combine(handle), expected_TD)
                    self.done.release()
        except BaseException as error:  # noqa: BLE001  raised again where the thread is awaited
            self.error = error
            self.done.release(1000)

    def _dispatch(self) -> tuple[Tensor, Any]:
        x_TD = torch.randint(-8, 9, (17, 4), generator=self._torch).float()
        ids_TK = torch.rand(17, EXPERTS, generator=self._torch).topk(3).indices
        weights_TK = torch.tensor([[0.5, 0.25, 0.25]]).expand(17, 3)
        return scaled(0, x_TD, ids_TK, weights_TK), self._link.dispatch(0, x_TD, ids_TK, weights_TK)


def test_sums_stay_right_while_replicas_join_leave_and_die(all_seats: Seats) -> None:
    seed = 20
    draw, cluster = random.Random(seed), Cluster(all_seats)
    with all_seats.linked(cluster.table(), unavailable_s=LIMIT_S, call_s=LIMIT_S) as link:
        cluster.link = link
        loads = [Load(link, seed + index) for index in range(all_seats.threads)]
        for load in loads:
            load.start()
        try:
            for _ in range(CHANGES):
                for _ in range(draw.randrange(4)):
                    assert draw.choice(loads).done.acquire(timeout=LIMIT_S)
                cluster.change(draw)
        finally:
            for load in loads:
                load.stop.set()
                load.join(LIMIT_S)
            cluster.close()
    assert [load.error for load in loads] == [None] * len(loads)
    all_seats.check(link)


class Mute:
    """Greets as an expert worker does, echoes, accepts whatever comes and never answers."""

    def __init__(self, seats: Seats) -> None:
        self.asked, self.release = 0, threading.Event()
        self.number, self.server = seats.serve(ALL, compute=self._wait)

    def _wait(self, _layer: int, x_TD: Tensor, *_: Tensor) -> Tensor:
        self.asked += 1
        self.release.wait(2 * LIMIT_S)
        return x_TD

    def close(self) -> None:
        self.release.set()
        self.server.close()


@pytest.fixture
def mute(seats: Seats) -> Iterator[Mute]:
    """Seat 0."""
    one = Mute(seats)
    yield one
    one.close()


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def rows(link: Any) -> Any:
    return link.dispatch(0, torch.ones(3, 4), torch.zeros(3, 1).long(), torch.ones(3, 1))


def test_a_server_that_never_answers_costs_the_deadline(mute: Mute, seats: Seats) -> None:
    _, well = seats.serve(ALL)
    call_s = 5.0  # the well one has to answer by then
    with seats.linked(table_of(seat_of(mute.server, 0), seat_of(well, 1)), call_s=call_s) as link:
        assert timed(lambda: link.combine(rows(link))) > call_s - 0.05
        asked = mute.asked
        mute.release.set()
        link.combine(rows(link))
        assert mute.asked == asked, "it takes no calls for a while"
    well.close()


def test_without_a_replica_the_wait_ends_typed(mute: Mute, seats: Seats) -> None:
    with seats.linked(table_of(seat_of(mute.server, 0)), call_s=0.2, unavailable_s=0.3) as link:
        began = time.monotonic()
        with pytest.raises(ExpertUnavailable, match="shard group 0 could compute layer 0") as caught:
            link.combine(rows(link))
        assert time.monotonic() - began > 0.45
    assert caught.value.retryable


def test_a_peer_that_vanishes_is_noticed_by_its_silence(seats: Seats) -> None:
    """It greets and echoes, then neither reads nor sends nor closes. It can have no lane and no memory; others may."""
    listener = socket.create_server(("127.0.0.1", 0))

    def vanish() -> None:
        sock, _ = listener.accept()
        stream = Stream(sock, silence_s=LIMIT_S, name="link")
        tcp_handshake.admit(stream, SECRET, hello(seat=1), time.monotonic() + LIMIT_S)
        echo = read_frame(stream, Limits(4096, 1 << 16))
        stream.send(frame_parts(Kind.ECHO, message_of(echo, Echo), [echo.payload]))
        kept.append(stream)

    kept: list[Stream] = []
    thread = threading.Thread(target=vanish, daemon=True)
    thread.start()
    number, well = seats.serve(ALL)
    host, port = listener.getsockname()
    ghost = Seat(number=number + 1, worker=f"experts-{number + 1}", group=0, host=host, port=port)
    table = table_of(ghost, seat_of(well, number))
    with seats.linked(table, timing=FAST, call_s=600, unavailable_s=600, without=1) as link:
        assert timed(lambda: link.combine(rows(link))) < LIMIT_S
    well.close()
    listener.close()
    for stream in kept:
        stream.close()


WORKER = """
import sys, torch
torch.set_num_threads(1)
from testkit.fabric.replicas import KINDS, ThreadSeats
seats = ThreadSeats(KINDS[sys.argv[1]])
number, server = seats.serve({0: range(8)}, compute=lambda layer, x, ids, weights: (sys.stdin.readline(), x)[1])
print(*server.address, flush=True)
sys.stdin.read()
import threading; threading.Event().wait(30)
"""


@pytest.mark.parametrize("kind", ["tcp", "lane", "shared"])
def test_a_process_killed_in_the_middle_of_a_call(kind: str) -> None:
    root, seats = Path(__file__).parents[2], ThreadSeats(KINDS[kind], first=1)
    paths = os.pathsep.join(str(root / part) for part in (".", "kernels", "tests"))
    command = [sys.executable, "-c", WORKER, kind]
    worker = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    number, well = seats.serve(ALL)
    try:
        assert worker.stdout is not None
        host, port = worker.stdout.readline().split()
        victim = Seat(number=0, worker="experts-0", group=0, host=host, port=int(port))
        with seats.linked(table_of(victim, seat_of(well, number)), call_s=600, unavailable_s=600) as link:
            killing = threading.Timer(KILL_S, worker.send_signal, [signal.SIGKILL])
            found: list[Tensor] = []
            # it waits for a line that never comes
            assert KILL_S / 2 < timed(lambda: (killing.start(), found.append(link.combine(rows(link))))) < LIMIT_S
            assert torch.equal(found[0], torch.ones(3, 4))
            assert link.usable() == (number,)
    finally:
        worker.kill()
        worker.communicate()
        well.close()
