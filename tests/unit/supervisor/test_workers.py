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
from testkit.processes.stand_in_roles import killed_and_reported, notes_in
from testkit.waiting import LIMIT_S, eventually

from services.config import Settings
from services.errors import PortInUse
from services.runtime import FORCED
from services.supervisor import Workers
from services.supervisor.policy import RestartPolicy

_FAKES = Path(__file__).parent / "fakes"
_MODULES = dict.fromkeys(("attention", "colocated", "experts"), "fake_role")
During = Callable[[], Awaitable[None]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins leave their notes."""
    monkeypatch.setenv("PYTHONPATH", str(_FAKES))
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    secret = tmp_path / "secret"
    secret.write_text("s" * 16)
    return tmp_path


def _policy() -> RestartPolicy:
    return RestartPolicy(first_delay_s=0.01, max_failures=3)


def _workers(
    home: Path, *, stuck_s: float = 60.0, new_policy: Callable[[], RestartPolicy] = _policy, **values: object
) -> Workers:
    common = {"model": "m", "redis_url": "redis://h", "fabric_secret_file": home / "secret", "drain_timeout": 5.0}
    return Workers(
        Settings(**(common | values)),  # type: ignore[arg-type]
        modules=_MODULES,  # type: ignore[arg-type]
        check_model=lambda _: None,
        new_policy=new_policy,
        stuck_s=stuck_s,
    )


async def _run(home: Path, during: During | None = None, **values: object) -> int:
    """Exit code of workers that are stopped when ``during`` has; without it they end by themselves."""
    stop = asyncio.Event()
    running = asyncio.create_task(_workers(home, **values).run(stop))
    async with asyncio.timeout(LIMIT_S):
        if during is not None:
            await during()
            assert not running.done()
            stop.set()
        return await running


def _started(home: Path) -> dict[str, dict[str, Any]]:
    """Settings by name."""
    return {note["role"]: note["settings"] for note in notes_in(home)}


def _until_started(home: Path, count: int) -> During:
    return lambda: eventually(lambda: len(notes_in(home)) == count)


async def test_each_worker_has_a_gpu_and_ports_of_its_own(home: Path) -> None:
    first, fabric = free_ports(4), free_ports(3)
    ports = {"metrics_port": first, "fabric_port": fabric}
    assert await _run(home, _until_started(home, 3), layout="colocated", workers=3, device="cuda", **ports) == 0
    started = [_started(home)[f"colocated-{number}"] for number in range(3)]
    assert [settings["device"] for settings in started] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [settings["metrics_port"] for settings in started] == [first + 1, first + 2, first + 3]
    assert [settings["fabric_port"] for settings in started] == [fabric, fabric + 1, fabric + 2]
    assert [settings["expert_group"] for settings in started] == [None] * 3, "the scheduler says who holds what"
    assert [settings["process"] for settings in started] == [f"colocated-{number}" for number in range(3)]
    assert {settings["supervisor_pid"] for settings in started} == {os.getpid()}
    assert {settings["redis_url"] for settings in started} == {"redis://h"}


async def test_ports_that_nobody_asked_for_are_free_ones(home: Path) -> None:
    assert await _run(home, _until_started(home, 2), layout="colocated", workers=2) == 0
    started = _started(home).values()
    assert len({settings["metrics_port"] for settings in started} - {0}) == 2
    assert {settings["fabric_port"] for settings in started} == {0}


async def test_seats_hold_the_groups_in_turn(home: Path) -> None:
    assert (
        await _run(home, _until_started(home, 5), workers=2, layout="disaggregated", expert_workers=3, expert_groups=2)
        == 0
    )
    started = _started(home)
    assert [started[f"experts-{number}"]["expert_group"] for number in range(3)] == [0, 1, 0]
    assert [started[f"attention-{number}"]["expert_group"] for number in range(2)] == [None, None]
    assert {settings["layout"] for settings in started.values()} == {"disaggregated"}
    assert sorted(settings["device"] for settings in started.values()) == [f"auto:{gpu}" for gpu in range(5)]


async def test_where_there_are_more_groups_than_seats_the_scheduler_says_who_holds_what(home: Path) -> None:
    assert (
        await _run(home, _until_started(home, 2), workers=0, layout="disaggregated", expert_workers=2, expert_groups=3)
        == 0
    )
    assert {settings["expert_group"] for settings in _started(home).values()} == {None}


async def test_attention_workers_may_be_alone(home: Path) -> None:
    assert await _run(home, _until_started(home, 2), workers=2) == 0
    assert {settings["layout"] for settings in _started(home).values()} == {"local"}


async def test_attention_ends_before_the_seats_that_it_uses(home: Path) -> None:
    assert await _run(home, _until_started(home, 3), layout="disaggregated", expert_workers=2) == 0
    assert next(note["role"] for note in notes_in(home, "stopped")) == "attention"


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

    assert await _run(home, during, layout="colocated", workers=2, metrics_port=port) == 0


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


async def test_none_is_ready_while_they_end(home: Path) -> None:
    (home / "pages").touch()
    (home / "colocated-0.stubborn").touch()
    port, stop = free_ports(3), asyncio.Event()
    workers = _workers(home, layout="colocated", workers=2, metrics_port=port)
    running = asyncio.create_task(workers.run(stop))
    await _until_ready(port)
    stop.set()
    await _until_ready(port, "waiting for colocated-0 (its end), colocated-1 (its end)\n")
    workers.kill()
    await running


async def test_one_that_answers_no_more_is_killed_and_comes_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "pages").touch()
    port, stop = free_ports(3), asyncio.Event()
    running = asyncio.create_task(
        _workers(home, stuck_s=6.0, layout="colocated", workers=2, metrics_port=port).run(stop)
    )
    await _until_ready(port)
    victim = next(note for note in notes_in(home) if note["role"] == "colocated-1")
    os.kill(victim["pid"], signal.SIGSTOP)
    await eventually(lambda: len(notes_in(home)) == 3)
    await _until_ready(port)
    assert notes_in(home)[-1]["role"] == "colocated-1"
    assert "colocated-1 has not answered for 6 s; killing it" in caplog.text
    stop.set()
    assert await running == 0


async def test_one_that_loads_for_long_is_not_killed(home: Path) -> None:
    """It has not answered yet: no page is there."""
    stop = asyncio.Event()
    running = asyncio.create_task(_workers(home, stuck_s=0.1, layout="colocated", workers=1).run(stop))
    await _until_started(home, 1)()
    await asyncio.sleep(1.5)
    stop.set()
    assert await running == 0
    assert len(notes_in(home)) == 1


@pytest.mark.parametrize("code", [1, 2, 3])
async def test_once_they_have_served_no_code_of_one_ends_the_others(home: Path, code: int) -> None:
    (home / "pages").touch()
    port = free_ports(3)

    async def during() -> None:
        await _until_ready(port)
        (home / "colocated-1.end").write_text(str(code))
        await eventually(lambda: len(notes_in(home)) == 3)
        await _until_ready(port)

    assert await _run(home, during, layout="colocated", workers=2, metrics_port=port) == 0
    assert [note["role"] for note in notes_in(home)].count("colocated-0") == 1


async def test_lives_of_any_length_count_as_failures_while_none_has_served(home: Path) -> None:
    """As where each takes minutes to load what there is no memory for."""
    for number in range(2):
        (home / f"colocated-{number}.fail").write_text("70 " * 50)
    policy = partial(RestartPolicy, first_delay_s=0.01, max_failures=3, healthy_s=1e-6)
    assert await _workers(home, new_policy=policy, layout="colocated", workers=2).run(asyncio.Event()) == 70


async def test_one_that_dies_comes_again_as_it_was_and_is_counted(home: Path) -> None:
    port = free_ports(3)

    async def during() -> None:
        await _until_started(home, 2)()
        victim = next(note for note in notes_in(home) if note["role"] == "colocated-1")
        os.kill(victim["pid"], signal.SIGKILL)
        await eventually(lambda: len(notes_in(home)) == 3)
        page = await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{port}/metrics")
        assert 'expertmesh_worker_starts_total{role="workers",worker="colocated-1"} 2.0' in page.text

    assert await _run(home, during, layout="colocated", workers=2, expert_groups=2, metrics_port=port) == 0
    lives = [note["settings"] for note in notes_in(home) if note["role"] == "colocated-1"]
    assert lives[0] == lives[1]


async def test_redis_learns_of_a_worker_that_ended(home: Path, redis_url: str) -> None:
    async def during() -> None:
        await _until_started(home, 2)()
        await killed_and_reported(redis_url, "of-a-machine", notes_in(home)[0])

    assert await _run(home, during, layout="colocated", workers=2, redis_url=redis_url, namespace="of-a-machine") == 0


async def test_one_that_keeps_failing_is_tried_on_while_others_work(home: Path) -> None:
    (home / "colocated-1.fail").write_text("70 kill 70 70 70 70")
    during = _until_started(home, 8)
    assert await _run(home, during, layout="colocated", workers=2) == 0


async def test_all_that_keep_failing_end_it(home: Path) -> None:
    for number in range(2):
        (home / f"colocated-{number}.fail").write_text("70 " * 50)
    assert await _run(home, layout="colocated", workers=2) == 70


async def test_what_the_next_try_would_repeat_ends_it_with_its_code(home: Path) -> None:
    (home / "colocated-1.fail").write_text("3")
    assert await _run(home, layout="colocated", workers=2) == 3
    assert [note["role"] for note in notes_in(home)].count("colocated-1") == 1


@pytest.mark.parametrize(("number", "option"), [(0, "--metrics-port"), (2, "--metrics-port"), (4, "--fabric-port")])
async def test_a_taken_port_is_reported_before_anything_starts(home: Path, number: int, option: str) -> None:
    first = free_ports(5)
    ports = {"metrics_port": first, "fabric_port": first + 3}
    with (
        socket.create_server(("127.0.0.1", first + number)),
        pytest.raises(PortInUse, match=f"{first + number}.*{option}"),
    ):
        await _run(home, layout="colocated", workers=2, **ports)
    assert not notes_in(home)


async def test_a_workers_ports_stay_its_own_while_it_is_away(home: Path) -> None:
    first = free_ports(5)
    ports = {"metrics_port": first, "fabric_port": first + 3}

    async def during() -> None:
        await _until_started(home, 2)()
        for port in range(first + 1, first + 5):
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", port))

    assert await _run(home, during, layout="colocated", workers=2, **ports) == 0


async def test_a_second_signal_does_not_wait(home: Path) -> None:
    (home / "colocated-0.stubborn").touch()
    stop = asyncio.Event()
    workers = _workers(home, layout="colocated", workers=2)
    running = asyncio.create_task(workers.run(stop))
    await _until_started(home, 2)()
    stop.set()
    await eventually(lambda: notes_in(home, "stopped"))
    assert not running.done()
    workers.kill()
    async with asyncio.timeout(LIMIT_S):
        assert await running == FORCED
