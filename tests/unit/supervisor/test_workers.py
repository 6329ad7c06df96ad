"""`expertmesh workers` over stand-ins for the roles: ports, groups, GPUs, one page, restarts, giving up, the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from testkit.processes.servers import free_ports
from testkit.processes.stand_in_roles import (
    COMMANDS,
    few_tries,
    killed_and_reported,
    names_in,
    notes_in,
    settings_in,
    until_started,
)
from testkit.waiting import LIMIT_S, eventually

from services.config import Settings
from services.errors import PortInUse
from services.runtime import FORCED
from services.supervisor import Workers
from services.supervisor.policy import RestartPolicy

During = Callable[[], Awaitable[None]]
SEATS: dict[str, Any] = {"layout": "colocated", "workers": 2}


def _workers(
    home: Path, *, stuck_s: float = 60.0, new_policy: Callable[[], RestartPolicy] = few_tries, **values: object
) -> Workers:
    secret = home / "secret"
    secret.write_text("s" * 16)
    common = {"model": "m", "redis_url": "redis://h", "fabric_secret_file": secret, "drain_timeout": 5.0}
    return Workers(
        Settings(**(common | values)),  # type: ignore[arg-type]
        commands=COMMANDS,
        check=lambda _: None,
        new_policy=new_policy,
        stuck_s=stuck_s,
    )


async def _run(home: Path, during: During | None = None, **values: Any) -> int:
    """Exit code of workers that are stopped when ``during`` has; without it they end by themselves."""
    stop = asyncio.Event()
    running = asyncio.create_task(_workers(home, **values).run(stop))
    async with asyncio.timeout(LIMIT_S):
        if during is not None:
            await during()
            assert not running.done()
            stop.set()
        return await running


async def test_each_worker_has_a_gpu_and_ports_of_its_own_that_stay_its_own_while_it_is_away(home: Path) -> None:
    first, fabric = free_ports(4), free_ports(3)

    async def during() -> None:
        await until_started(home, 3)
        for port in (*range(first + 1, first + 4), *range(fabric, fabric + 3)):
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", port))

    options = {"layout": "colocated", "workers": 3, "device": "cuda", "metrics_port": first, "fabric_port": fabric}
    assert await _run(home, during, **options) == 0
    for number in range(3):
        settings = settings_in(home)[f"colocated-{number}"]
        assert settings["device"] == f"cuda:{number}"
        assert (settings["metrics_port"], settings["fabric_port"]) == (first + 1 + number, fabric + number)
        assert settings["expert_group"] is None, "the scheduler says who holds what"
        assert settings["process"] == f"colocated-{number}"
        assert (settings["supervisor_pid"], settings["redis_url"]) == (os.getpid(), "redis://h")


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"workers": 2}, {"attention-0": None, "attention-1": None}),
        (SEATS, {"colocated-0": None, "colocated-1": None}),
        ({"expert_workers": 2}, {"attention": None, "experts-0": None, "experts-1": None}),
        (
            {"workers": 2, "expert_workers": 3, "expert_groups": 2},
            {"attention-0": None, "attention-1": None, "experts-0": 0, "experts-1": 1, "experts-2": 0},
        ),
        ({"workers": 0, "expert_workers": 2, "expert_groups": 3}, {"experts-0": None, "experts-1": None}),
    ],
    ids=["attention alone", "colocated", "disaggregated", "groups in turn", "more groups than seats"],
)
async def test_seats_hold_the_groups_in_turn_where_there_are_enough(
    home: Path, options: dict[str, Any], groups: dict[str, int | None]
) -> None:
    """Where not, the scheduler says who holds what. Ports that nobody asked for are free ones."""
    layout = options.get("layout", "disaggregated" if "expert_workers" in options else "local")
    assert await _run(home, partial(until_started, home, len(groups)), **options | {"layout": layout}) == 0
    started = settings_in(home)
    assert {name: settings["expert_group"] for name, settings in started.items()} == groups
    assert {settings["layout"] for settings in started.values()} == {layout}
    assert [started[name]["device"] for name in groups] == [f"auto:{gpu}" for gpu in range(len(groups))]
    assert len({settings["metrics_port"] for settings in started.values()} - {0}) == len(groups)
    assert {settings["fabric_port"] for settings in started.values()} == {0}
    ended = [name.partition("-")[0] for name in names_in(home, "stopped")]
    assert len(ended) == len(groups)
    assert ended == sorted(ended), "attention before the seats that it uses"


async def test_one_page_shows_all_and_is_ready_when_all_are(home: Path) -> None:
    (home / "pages").touch()
    (home / "colocated-1.missing").write_text("weights")
    port = free_ports(3)

    async def during() -> None:
        await _until_ready(port, "waiting for colocated-1 (weights)\n")
        assert (await _get(port, "health")).status_code == 200
        page = (await _get(port, "metrics")).text
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        rows = {sample.labels["role"]: sample.value for sample in samples if sample.name == "rows"}
        assert rows == {"colocated-0": 5.0, "colocated-1": 5.0}
        starts = {s.labels["worker"]: s.value for s in samples if s.name == "expertmesh_worker_starts_total"}
        assert starts == {"colocated-0": 1.0, "colocated-1": 1.0}
        (home / "colocated-1.missing").unlink()
        await _until_ready(port)

    assert await _run(home, during, **SEATS, metrics_port=port) == 0


async def _get(port: int, name: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{port}/{name}")


async def _until_ready(port: int, text: str = "ready\n") -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await _get(port, "ready")).text == text:
                    return
            await asyncio.sleep(0.05)


async def test_while_they_end_none_is_ready_and_a_second_signal_does_not_wait(home: Path) -> None:
    (home / "pages").touch()
    (home / "colocated-0.stubborn").touch()
    port, stop = free_ports(3), asyncio.Event()
    workers = _workers(home, **SEATS, metrics_port=port, drain_timeout=LIMIT_S)
    running = asyncio.create_task(workers.run(stop))
    await _until_ready(port)
    stop.set()
    await _until_ready(port, "waiting for colocated-0 (its exit), colocated-1 (its exit)\n")
    await eventually(lambda: notes_in(home, "stopped"))
    assert not running.done()
    workers.kill()
    async with asyncio.timeout(LIMIT_S):
        assert await running == FORCED


async def test_one_that_answers_no_more_is_killed_and_comes_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "pages").touch()
    port, stop = free_ports(3), asyncio.Event()
    running = asyncio.create_task(_workers(home, stuck_s=6.0, **SEATS, metrics_port=port).run(stop))
    await _until_ready(port)
    victim = next(note for note in notes_in(home) if note["role"] == "colocated-1")
    os.kill(victim["pid"], signal.SIGSTOP)
    await until_started(home, 3)
    await _until_ready(port)
    assert notes_in(home)[-1]["role"] == "colocated-1"
    assert "colocated-1 has not answered for 6 s; killing it" in caplog.text
    stop.set()
    assert await running == 0


async def test_one_that_loads_for_long_is_not_killed(home: Path) -> None:
    """It has not answered yet: no page is there."""
    stop = asyncio.Event()
    running = asyncio.create_task(_workers(home, stuck_s=0.1, layout="colocated", workers=1).run(stop))
    await until_started(home, 1)
    await asyncio.sleep(1.5)
    stop.set()
    assert await running == 0
    assert len(notes_in(home)) == 1


async def test_once_they_have_served_no_code_of_one_ends_the_others(home: Path) -> None:
    (home / "pages").touch()
    port = free_ports(3)

    async def during() -> None:
        await _until_ready(port)
        for code in (1, 2, 3):
            (home / "colocated-1.end").write_text(str(code))
            await until_started(home, 2 + code)
            await _until_ready(port)

    assert await _run(home, during, **SEATS, metrics_port=port) == 0
    assert names_in(home).count("colocated-0") == 1


async def test_one_that_dies_comes_again_as_it_was_is_counted_and_redis_learns_of_its_end(
    home: Path, redis_url: str
) -> None:
    port = free_ports(3)

    async def during() -> None:
        await until_started(home, 2)
        victim = next(note for note in notes_in(home) if note["role"] == "colocated-1")
        await killed_and_reported(redis_url, "of-a-machine", victim)
        await until_started(home, 3)
        page = (await _get(port, "metrics")).text
        assert 'expertmesh_worker_starts_total{role="workers",worker="colocated-1"} 2.0' in page

    options = {"redis_url": redis_url, "namespace": "of-a-machine", "metrics_port": port, "expert_groups": 2}
    assert await _run(home, during, **SEATS, **options) == 0
    lives = [note["settings"] for note in notes_in(home) if note["role"] == "colocated-1"]
    assert lives[0] == lives[1]


async def test_one_that_keeps_failing_is_tried_on_while_others_work(home: Path) -> None:
    (home / "colocated-1.fail").write_text("70 kill 70 70 70 70")
    assert await _run(home, partial(until_started, home, 8), **SEATS) == 0


@pytest.mark.parametrize("healthy_s", [10.0, 1e-6])
async def test_all_that_keep_failing_end_it(home: Path, healthy_s: float) -> None:
    """While none has served, lives of any length count as failures: each may take minutes to load what there is no
    memory for."""
    for number in range(2):
        (home / f"colocated-{number}.fail").write_text("70 " * 50)
    policy = partial(RestartPolicy, first_delay_s=0.01, max_failures=3, healthy_s=healthy_s)
    assert await _run(home, new_policy=policy, **SEATS) == 70


async def test_what_the_next_try_would_repeat_ends_it_with_its_code(home: Path) -> None:
    (home / "colocated-1.fail").write_text("3")
    assert await _run(home, **SEATS) == 3
    assert names_in(home).count("colocated-1") == 1


@pytest.mark.parametrize(("number", "option"), [(0, "--metrics-port"), (2, "--metrics-port"), (4, "--fabric-port")])
async def test_a_taken_port_is_reported_before_anything_starts(home: Path, number: int, option: str) -> None:
    first = free_ports(5)
    ports = {"metrics_port": first, "fabric_port": first + 3}
    with (
        socket.create_server(("127.0.0.1", first + number)),
        pytest.raises(PortInUse, match=f"{first + number}.*{option}"),
    ):
        await _run(home, **SEATS, **ports)
    assert not notes_in(home)
