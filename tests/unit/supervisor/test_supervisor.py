"""`expertmesh serve` over stand-ins for the roles: order, hand-over, restarts, giving up, and no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit.processes.stand_in_roles import Notes, killed_and_reported, notes_in
from testkit.waiting import LIMIT_S, eventually

from services.config import Settings
from services.errors import CheckpointError, ConfigError, PortInUse
from services.runtime import FORCED
from services.supervisor import Supervisor
from services.supervisor.handover import RunFolder, base_url, check_port, held_ports
from services.supervisor.policy import RestartPolicy

_FAKES = Path(__file__).parent / "fakes"
_MODULES = dict.fromkeys(("gateway", "scheduler", "attention"), "fake_role")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins leave their notes; also the folder of temporary files."""
    monkeypatch.setenv("PYTHONPATH", str(_FAKES))
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setenv("EXPERTMESH_PORT", "1")
    return tmp_path


@pytest.fixture
def offspring() -> Callable[[], list[psutil.Process]]:
    """Our child processes that this test started; servers that other tests share do not count."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


def _policy() -> RestartPolicy:
    return RestartPolicy(first_delay_s=0.01, max_failures=3)


def _supervisor(
    on_ready: Callable[[str], Awaitable[None]] | None = None,
    stop_margin_s: float = 5.0,
    modules: dict[str, str] = _MODULES,
    **values: object,
) -> Supervisor:
    settings = Settings(**({"model": "m", "port": 0, "drain_timeout": 5.0} | values))  # type: ignore[arg-type]
    return Supervisor(
        settings,
        on_ready=on_ready,
        modules=modules,  # type: ignore[arg-type]
        check_model=lambda _: None,
        new_policy=_policy,
        stop_margin_s=stop_margin_s,
    )


async def _run(during: Callable[[str], Awaitable[None]], **values: Any) -> int:
    """Runs a supervisor until ``during(url)``, called when it is ready, returns."""
    stop = asyncio.Event()

    async def on_ready(url: str) -> None:
        try:
            await during(url)
        finally:
            stop.set()

    async with asyncio.timeout(LIMIT_S):
        return await _supervisor(on_ready, **values).run(stop)


async def _nothing(_: str) -> None:
    pass


def _until_started(home: Path, count: int) -> Callable[[str], Awaitable[None]]:
    """The stand-in for the gateway is ready once three roles are."""
    return lambda _: eventually(lambda: len(notes_in(home)) == count)


async def test_every_role_gets_the_effective_settings(home: Path) -> None:
    assert await _run(_nothing, lease=2.5, kv_blocks=7, served_model_name="näme") == 0
    started = {note["role"]: note for note in notes_in(home)}
    assert set(started) == set(_MODULES)
    for note in started.values():
        values = note["settings"]
        assert (values["lease"], values["kv_blocks"], values["served_model_name"]) == (2.5, 7, "näme")
        assert values["redis_url"].startswith("unix://")
        assert values["supervisor_pid"] == os.getpid()
        assert note["environment"] == [], "the environment was already taken into account"
        assert note["mode"] == "0o100600"
        assert note["session"] == note["pid"], "a session of its own, out of reach of the terminal's Ctrl-C"
    upstreams = started["gateway"]["settings"]["metrics_upstreams"]
    ports = {role: started[role]["settings"]["metrics_port"] for role in ("scheduler", "attention")}
    assert upstreams == [f"{role}=http://127.0.0.1:{port}/metrics" for role, port in ports.items()]
    assert len(set(ports.values())) == 2


async def test_ready_is_announced_once_and_so_is_the_end(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "not-ready").touch()
    urls: list[str] = []

    async def during(url: str) -> None:
        urls.append(url)

    async def become_ready() -> None:
        await eventually(lambda: len(notes_in(home)) == 3)
        await asyncio.sleep(0.5)
        assert not urls
        (home / "not-ready").unlink()

    await asyncio.gather(_run(during), become_ready())
    ready, stopping = capsys.readouterr().out.splitlines()
    assert ready == f"expertmesh serves m at {urls[0]}/v1"
    assert "a second Ctrl-C stops at once" in stopping


async def test_the_gateway_stops_first_and_nothing_is_left(
    home: Path, offspring: Callable[[], list[psutil.Process]]
) -> None:
    folders: list[Path] = []

    async def during(_: str) -> None:
        socket_path = Path(notes_in(home)[0]["settings"]["redis_url"].removeprefix("unix://"))
        assert socket_path.exists()
        folders.append(socket_path.parent.parent)

    assert await _run(during) == 0
    assert [note["role"] for note in notes_in(home, "stopped")] == ["gateway", "scheduler", "attention"]
    assert not folders[0].exists()
    assert not offspring()


async def test_long_names_of_temporary_folders_do_no_harm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = home / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert await _run(_nothing) == 0


@pytest.mark.parametrize("role", _MODULES)
async def test_a_role_that_dies_is_started_again(home: Path, role: str) -> None:
    def lives() -> Notes:
        return [note for note in notes_in(home) if note["role"] == role]

    async def during(_: str) -> None:
        os.kill(lives()[0]["pid"], signal.SIGKILL)
        await eventually(lambda: len(lives()) == 2)

    assert await _run(during) == 0
    first, second = lives()
    assert first["settings"] == second["settings"]


async def test_redis_is_started_again_at_the_same_place(
    home: Path, offspring: Callable[[], list[psutil.Process]]
) -> None:
    async def during(_: str) -> None:
        path = Path(notes_in(home)[0]["settings"]["redis_url"].removeprefix("unix://"))
        server = next(child for child in offspring() if child.name() == "redis-server")
        server.kill()
        await eventually(lambda: _answers(path) and not server.is_running())

    assert await _run(during) == 0


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16) == b"+PONG\r\n"
        except OSError:
            return False


async def test_a_role_that_cannot_start_ends_the_server_with_its_code(home: Path) -> None:
    (home / "attention.fail").write_text("3 0")
    (home / "attention.fails-after").write_text("3")  # one stopped before it handles SIGTERM writes nothing
    assert await _run(_nothing_ever) == 3
    assert [note["role"] for note in notes_in(home)].count("attention") == 1, "start-up errors are not retried"
    assert {note["role"] for note in notes_in(home, "stopped")} == {"gateway", "scheduler"}


async def test_a_failure_at_the_end_is_logged(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "attention.last").write_text("70")
    assert await _run(_until_started(home, 3)) == 0
    logged = [line for line in caplog.messages if "stopped, but" in line]
    assert logged == ["attention was stopped, but ended with exit code 70"]


@pytest.mark.parametrize(("codes", "code"), [("70 70 70 70", 70), ("kill kill kill kill", 137), ("0 0 0 0", 70)])
async def test_a_role_that_keeps_dying_is_given_up(home: Path, codes: str, code: int) -> None:
    (home / "scheduler.fail").write_text(codes)
    assert await _run(_nothing_ever) == code
    assert [note["role"] for note in notes_in(home)].count("scheduler") == 3


async def test_expert_workers_are_processes_that_share_a_secret_with_the_attention_worker(home: Path) -> None:
    modules = _MODULES | {"experts": "fake_role"}
    assert await _run(_until_started(home, 5), layout="disaggregated", expert_workers=2, modules=modules) == 0
    started = {note["role"]: note["settings"] for note in notes_in(home, "started")}
    assert set(started) == {*_MODULES, "experts-0", "experts-1"}
    assert started["attention"]["layout"] == "disaggregated"
    assert {started[name]["device"] for name in ("attention", "experts-0", "experts-1")} == {
        "auto:0",
        "auto:1",
        "auto:2",
    }
    assert len({started[name]["fabric_secret_file"] for name in ("attention", "experts-0", "experts-1")}) == 1
    assert len({started[name]["metrics_port"] for name in started if name != "gateway"}) == 4
    assert [note["role"] for note in notes_in(home, "stopped")][:3] == ["gateway", "scheduler", "attention"]


async def test_several_attention_workers_are_processes_of_their_own(home: Path) -> None:
    assert await _run(_until_started(home, 4), workers=2) == 0
    started = {note["role"]: note["settings"] for note in notes_in(home)}
    assert set(started) == {"gateway", "scheduler", "attention-0", "attention-1"}
    assert len({started[name]["metrics_port"] for name in started if name != "gateway"}) == 3
    upstreams = started["gateway"]["metrics_upstreams"]
    assert [upstream.split("=")[0] for upstream in upstreams] == ["scheduler", "attention-0", "attention-1"]


_EXPERTS: dict[str, Any] = {"modules": _MODULES | {"experts": "fake_role"}, "expert_groups": 1}


async def test_a_replica_that_keeps_dying_does_not_end_the_server(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "experts-1.fail").write_text("70 kill 70 70 70 70")

    def lives() -> int:
        return [note["role"] for note in notes_in(home)].count("experts-1")

    async def during(_: str) -> None:
        await eventually(lambda: lives() == 7)

    assert await _run(during, layout="disaggregated", expert_workers=2, **_EXPERTS) == 0
    assert "experts-1 keeps failing" in caplog.text


@pytest.mark.parametrize("groups", [1, 2])
async def test_expert_workers_that_all_keep_dying_or_without_replicas_end_the_server(home: Path, groups: int) -> None:
    for name in ("experts-0", "experts-1")[groups - 1 :]:
        (home / f"{name}.fail").write_text("70 " * 50)
    assert (
        await _run(_nothing_ever, layout="disaggregated", expert_workers=2, **(_EXPERTS | {"expert_groups": groups}))
        == 70
    )


async def test_expert_workers_are_stopped_together(home: Path) -> None:
    for index in range(4):
        (home / f"experts-{index}.stubborn").touch()
    began: list[float] = []

    async def during(_: str) -> None:
        began.append(time.monotonic())

    assert (
        await _run(during, layout="disaggregated", expert_workers=4, drain_timeout=0.0, stop_margin_s=2.0, **_EXPERTS)
        == 0
    )
    assert time.monotonic() - began[0] < 6


async def test_attention_workers_that_share_the_experts_have_ranks_and_meet_at_one_address(home: Path) -> None:
    assert await _run(_until_started(home, 5), layout="lockstep", workers=3) == 0
    started = {note["role"]: note["settings"] for note in notes_in(home, "started")}
    assert set(started) == {"gateway", "scheduler", "attention-0", "attention-1", "attention-2"}
    ranks = [started[f"attention-{number}"] for number in range(3)]
    assert [(rank["layout"], rank["rank"], rank["workers"]) for rank in ranks] == [("lockstep", n, 3) for n in range(3)]
    assert len({rank["lockstep_address"] for rank in ranks}) == 1
    assert len({rank["fabric_secret_file"] for rank in ranks}) == 1
    assert len({rank["metrics_port"] for rank in ranks}) == 3


_SEATS: dict[str, Any] = {"layout": "colocated", "modules": _MODULES | {"colocated": "fake_role"}}


async def test_attention_workers_with_seats_share_the_experts_in_as_many_groups(home: Path) -> None:
    assert await _run(_until_started(home, 5), workers=3, device="cuda", **_SEATS) == 0
    started = {note["role"]: note["settings"] for note in notes_in(home, "started")}
    names = [f"colocated-{number}" for number in range(3)]
    assert set(started) == {"gateway", "scheduler", *names}
    assert [started[name]["device"] for name in names] == ["cuda:0", "cuda:1", "cuda:2"]
    assert started["scheduler"]["expert_groups"] == 3
    assert len({started[name]["fabric_secret_file"] for name in names}) == 1


async def test_fewer_groups_than_workers_with_seats_make_replicas(home: Path) -> None:
    (home / "colocated-1.fail").write_text("70 kill 70 70 70 70")

    async def during(_: str) -> None:
        await eventually(lambda: [note["role"] for note in notes_in(home)].count("colocated-1") == 7)

    assert await _run(during, workers=3, expert_groups=1, **_SEATS) == 0, "two others hold all experts"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"workers": 0}, "Without an attention worker nothing is served"),
        ({"workers": 2, "expert_groups": 3}, "--expert-groups 3 are more than the 2 seats"),
        ({"workers": 2, "overlap": "on"}, "--overlap on cannot be with --layout colocated"),
        ({"workers": 2, "expert_slices": 2}, "--expert-slices 2 cannot be"),
    ],
)
async def test_seats_that_cannot_be(home: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        await _supervisor(**_SEATS, **options).run(asyncio.Event())
    assert not notes_in(home)


async def test_a_worker_whose_experts_nobody_else_holds_ends_the_server(home: Path) -> None:
    (home / "colocated-1.fail").write_text("70 " * 50)
    assert await _run(_nothing_ever, workers=2, **_SEATS) == 70


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layout": "colocated", "expert_workers": 2}, "--expert-workers 2 is given, but with --layout colocated"),
        ({"expert_workers": 2}, "--layout local there are none. Give --layout disaggregated, too"),
        ({"layout": "disaggregated", "expert_workers": 0}, "Without an expert worker nothing is served"),
        ({"layout": "lockstep", "expert_groups": 2}, "with --layout lockstep experts are in no groups"),
    ],
)
async def test_counts_that_a_layout_does_not_have(home: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        await _supervisor(**options).run(asyncio.Event())
    assert not notes_in(home)


async def test_one_expert_worker_is_started_where_nobody_says_how_many(home: Path) -> None:
    modules = _MODULES | {"experts": "fake_role"}
    assert await _run(_until_started(home, 4), layout="disaggregated", modules=modules) == 0
    assert {note["role"] for note in notes_in(home)} == {*_MODULES, "experts-0"}


async def _nothing_ever(_: str) -> None:
    await asyncio.Event().wait()


async def test_a_second_signal_does_not_wait(home: Path, offspring: Callable[[], list[psutil.Process]]) -> None:
    for role in _MODULES:
        (home / f"{role}.stubborn").touch()
    stop = asyncio.Event()
    supervisor = _supervisor()
    running = asyncio.create_task(supervisor.run(stop))
    await eventually(lambda: len(notes_in(home)) == 3)
    stop.set()
    await asyncio.sleep(0.3)
    assert not running.done()
    began = time.monotonic()
    supervisor.kill()
    assert await running == FORCED
    assert time.monotonic() - began < 2
    assert not offspring()


async def test_a_role_that_ignores_sigterm_is_killed(home: Path, offspring: Callable[[], list[psutil.Process]]) -> None:
    (home / "scheduler.stubborn").touch()
    assert await _run(_nothing, stop_margin_s=0.5) == 0
    assert not offspring()


async def test_an_external_redis_is_used_as_it_is(home: Path, redis_url: str) -> None:
    assert await _run(_nothing, redis_url=redis_url) == 0
    assert {note["settings"]["redis_url"] for note in notes_in(home)} == {redis_url}


async def test_the_file_with_its_url_is_handed_on_and_not_what_is_in_it(home: Path, redis_url: str) -> None:
    file = home / "url"
    file.write_text(redis_url)
    assert await _run(_nothing, redis_url=redis_url, redis_url_file=file) == 0
    for note in notes_in(home):
        assert (note["settings"]["redis_url"], note["settings"]["redis_url_file"]) == (redis_url, str(file))


async def test_redis_learns_of_a_worker_that_ended(home: Path, redis_url: str) -> None:
    async def during(_: str) -> None:
        await eventually(lambda: len(notes_in(home)) == 3)
        attention = next(note for note in notes_in(home) if note["role"] == "attention")
        await killed_and_reported(redis_url, "of-a-server", attention)

    assert await _run(during, redis_url=redis_url, namespace="of-a-server") == 0


async def test_what_cannot_work_is_refused_before_anything_starts(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port} on 127.0.0.1 is taken.*--port N"):
            await _supervisor(port=port).run(asyncio.Event())
    with pytest.raises(ConfigError, match="--model DIR"):
        await _supervisor(model=None).run(asyncio.Event())
    with pytest.raises(CheckpointError):
        await Supervisor(Settings(model=home / "none")).run(asyncio.Event())
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.1"):
        check_port("203.0.113.1", 0)
    assert notes_in(home) == []


_SERVE = """
import asyncio
from services.config import Settings
from services.runtime import run_process
from services.supervisor import Supervisor

modules = dict.fromkeys(("gateway", "scheduler", "attention"), "fake_role")
supervisor = Supervisor(Settings(model="m", port=0), modules=modules, check_model=lambda _: None)
run_process(supervisor.run, force=supervisor.kill)
"""


@pytest.mark.usefixtures("home")
def test_no_orphan_after_kill_9_of_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        _kill_9()


def _kill_9() -> None:
    process = subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "serves" in process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=5)
    for orphan in alive:
        orphan.kill()
    process.communicate()
    assert len(gone) == 4


def test_folders_of_killed_supervisors_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        _sweep_in(Path(temporary))


def _sweep_in(temporary: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = temporary / f"expertmesh-serve-{dead.pid}-abc"
    living = temporary / f"expertmesh-serve-{os.getpid()}-abc"
    before = temporary / f"expertmesh-serve-{os.getpid()}.1-abc"
    for each in (left, living, before):
        each.mkdir()
    with RunFolder() as folder:
        assert not left.exists()
        assert living.exists()
        assert before.exists() is (sys.platform != "linux"), "of a life before under the same number, as in a container"
        assert folder.path.exists()
        with RunFolder():
            pass
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not folder.path.exists()


def test_held_ports_differ() -> None:
    with ExitStack() as held:
        assert len(set(held_ports("127.0.0.1", 20, held))) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is held: two sockets may not be bound to it")
def test_a_held_port_goes_to_the_child_that_asks_for_it_and_to_nobody_who_asks_for_any() -> None:
    with ExitStack() as held:
        (port,) = held_ports("127.0.0.1", 1, held)
        for _ in range(2):  # a child may end and be started again
            socket.create_server(("127.0.0.1", port)).close()
        with socket.socket() as whoever, pytest.raises(OSError, match="in use"):
            whoever.bind(("127.0.0.1", port))  # without SO_REUSEADDR, as the kernel looks for any


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("box", "http://box:1")]
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert base_url(host, 1) == url
