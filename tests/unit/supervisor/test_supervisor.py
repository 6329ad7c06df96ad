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

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
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
from services.errors import CheckpointError, ConfigError, PortInUse
from services.runtime import FORCED
from services.runtime.local_servers import LocalServer, local_servers
from services.runtime.run_folder import RunFolder
from services.supervisor import Supervisor
from services.supervisor.handover import base_url, check_port, held_ports

_ALONE = ("gateway", "scheduler", "attention")
_EXPERTS: dict[str, Any] = {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 1}
_SEATS: dict[str, Any] = {"layout": "colocated"}


@pytest.fixture
def offspring() -> Callable[[], list[psutil.Process]]:
    """Our child processes that this test started; servers that other tests share do not count."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


def _supervisor(
    on_ready: Callable[[str, str | None], Awaitable[None]] | None = None, stop_margin_s: float = 5.0, **values: object
) -> Supervisor:
    return Supervisor(
        Settings(**({"model": "m", "port": 0, "drain_timeout": 5.0} | values)),  # type: ignore[arg-type]
        on_ready=on_ready,
        commands=COMMANDS,
        check=lambda _: None,
        new_policy=few_tries,
        stop_margin_s=stop_margin_s,
    )


async def _run(during: Callable[[str], Awaitable[None]], **values: Any) -> int:
    """Runs a supervisor until ``during(url)``, called when it is ready, returns."""
    stop = asyncio.Event()

    async def on_ready(url: str, _key: str | None) -> None:
        try:
            await during(url)
        finally:
            stop.set()

    async with asyncio.timeout(LIMIT_S):
        return await _supervisor(on_ready, **values).run(stop)


async def _nothing(_: str) -> None:
    pass


async def _nothing_ever(_: str) -> None:
    await asyncio.Event().wait()


def _until_started(home: Path, count: int) -> Callable[[str], Awaitable[None]]:
    """The stand-in for the gateway is ready once three roles are."""
    return lambda _: until_started(home, count)


def _socket(home: Path) -> Path:
    return Path(notes_in(home)[0]["settings"]["redis_url"].removeprefix("unix://"))


async def test_every_role_gets_the_effective_settings(home: Path) -> None:
    assert await _run(_nothing, lease=2.5, kv_blocks=7, served_model_name="näme") == 0
    started = {note["role"]: note for note in notes_in(home)}
    assert set(started) == set(_ALONE)
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
    assert upstreams[0].startswith("serve=http://127.0.0.1:"), "the supervisor's own page"
    assert upstreams[1:] == [f"{role}=http://127.0.0.1:{port}/metrics" for role, port in ports.items()]


async def test_the_starts_of_each_process_are_counted(home: Path) -> None:
    (home / "scheduler.fail").write_text("70")
    pages: list[str] = []

    async def during(_: str) -> None:
        await eventually(lambda: names_in(home).count("scheduler") == 2)
        page = settings_in(home)["gateway"]["metrics_upstreams"][0].partition("=")[2]
        async with httpx.AsyncClient(trust_env=False) as client:
            pages.append((await client.get(page)).text)

    assert await _run(during) == 0
    series = [family for family in text_string_to_metric_families(pages[0]) if family.name.endswith("process_starts")]
    starts = {sample.labels["process"]: sample.value for family in series for sample in family.samples}
    assert starts == {"redis": 1, "gateway": 1, "scheduler": 2, "attention": 1}
    assert 'expertmesh_build_info{role="serve"' in pages[0]


async def test_ready_is_announced_once_and_in_the_end_the_gateway_stops_first_and_nothing_is_left(
    home: Path, offspring: Callable[[], list[psutil.Process]], capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "not-ready").touch()
    seen: list[tuple[str, Path]] = []

    async def during(url: str) -> None:
        assert _socket(home).exists()
        seen.append((url, _socket(home).parent.parent))

    async def become_ready() -> None:
        await until_started(home, 3)
        await asyncio.sleep(0.5)
        assert not seen
        (home / "not-ready").unlink()

    code, _ = await asyncio.gather(_run(during), become_ready())
    assert code == 0
    [(url, folder)] = seen
    ready, stopping = capsys.readouterr().out.splitlines()
    assert ready == f"expertmesh serves m at {url}/v1"
    assert "a second Ctrl-C stops at once" in stopping
    assert names_in(home, "stopped") == ["gateway", "scheduler", "attention"]
    assert not folder.exists()
    assert not offspring()


@pytest.mark.usefixtures("temporary")
async def test_while_it_runs_other_commands_find_it(home: Path) -> None:
    found: list[LocalServer] = []

    async def during(url: str) -> None:
        found.extend(local_servers())
        assert [server.url for server in found] == [url]

    assert await _run(during, namespace="mine", api_keys_file=home / "keys.yaml") == 0
    [server] = found
    names = ("redis_url", "redis_url_file", "namespace", "api_keys_file")
    values = {name: notes_in(home)[0]["settings"][name] for name in names}
    assert (server.settings, server.model_name) == (values, "m")
    assert local_servers() == []


async def test_long_names_of_temporary_folders_do_no_harm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = home / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert await _run(_nothing) == 0


async def test_whatever_dies_is_started_again_as_it_was(
    home: Path, offspring: Callable[[], list[psutil.Process]]
) -> None:
    async def during(_: str) -> None:
        for note in notes_in(home):
            os.kill(note["pid"], signal.SIGKILL)
            await eventually(lambda name=note["role"]: names_in(home).count(name) == 2)
        path, server = (
            _socket(home),
            next(child for child in offspring() if child.name() in ("redis-server", "valkey-server")),
        )
        server.kill()
        await eventually(lambda: _answers(path) and not server.is_running())

    assert await _run(during) == 0
    for name in _ALONE:
        first, second = (note["settings"] for note in notes_in(home) if note["role"] == name)
        assert first == second


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
    assert names_in(home).count("attention") == 1, "start-up errors are not retried"
    assert set(names_in(home, "stopped")) == {"gateway", "scheduler"}


async def test_a_failure_at_the_end_is_logged(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "attention.last").write_text("70")
    assert await _run(_until_started(home, 3)) == 0
    logged = [line for line in caplog.messages if "asked to stop, but" in line]
    assert logged == ["attention was asked to stop, but ended with exit code 70"]


@pytest.mark.parametrize(
    ("options", "failing", "codes", "code"),
    [
        pytest.param({}, ["scheduler"], "70 70 70 70", 70, id="by itself"),
        pytest.param({}, ["scheduler"], "kill kill kill kill", 137, id="killed"),
        pytest.param({}, ["scheduler"], "0 0 0 0", 70, id="as if all were well"),
        pytest.param(_EXPERTS, ["experts-0", "experts-1"], "70 " * 50, 70, id="all replicas"),
        pytest.param(_EXPERTS | {"expert_groups": 2}, ["experts-1"], "70 " * 50, 70, id="no replica"),
        pytest.param(_SEATS | {"workers": 2}, ["colocated-1"], "70 " * 50, 70, id="a seat without replica"),
    ],
)
async def test_what_keeps_dying_and_has_no_replica_ends_the_server(
    home: Path, options: dict[str, Any], failing: list[str], codes: str, code: int
) -> None:
    for name in failing:
        (home / f"{name}.fail").write_text(codes)
    assert await _run(_nothing_ever, **options) == code
    if failing == ["scheduler"]:
        assert names_in(home).count("scheduler") == 3


@pytest.mark.parametrize(
    ("options", "name"),
    [(_EXPERTS, "experts-1"), (_SEATS | {"workers": 3, "expert_groups": 1}, "colocated-1")],
    ids=["experts", "seats"],
)
async def test_a_replica_that_keeps_dying_does_not_end_the_server(
    home: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], name: str
) -> None:
    (home / f"{name}.fail").write_text("70 kill 70 70 70 70")
    assert await _run(lambda _: eventually(lambda: names_in(home).count(name) == 7), **options) == 0
    assert f"{name} keeps failing" in caplog.text


@pytest.mark.parametrize(
    ("options", "names", "handed"),
    [
        ({"workers": 2}, ["attention-0", "attention-1"], {"device": ["auto:0", "auto:1"]}),
        ({"layout": "disaggregated"}, ["attention", "experts-0"], {}),
        (
            {"layout": "disaggregated", "expert_workers": 2},
            ["attention", "experts-0", "experts-1"],
            {"layout": ["disaggregated"] * 3, "device": ["auto:0", "auto:1", "auto:2"]},
        ),
        (
            {"layout": "lockstep", "workers": 3},
            ["attention-0", "attention-1", "attention-2"],
            {"layout": ["lockstep"] * 3, "rank": [0, 1, 2], "workers": [3] * 3},
        ),
        (
            {"layout": "colocated", "workers": 3, "device": "cuda"},
            ["colocated-0", "colocated-1", "colocated-2"],
            {"device": ["cuda:0", "cuda:1", "cuda:2"]},
        ),
    ],
    ids=["attention workers", "one expert worker by default", "disaggregated", "lockstep", "colocated"],
)
async def test_each_layout_has_its_workers(
    home: Path, options: dict[str, Any], names: list[str], handed: dict[str, list[Any]]
) -> None:
    assert await _run(_until_started(home, 2 + len(names)), **options) == 0
    started = settings_in(home)
    assert set(started) == {"gateway", "scheduler", *names}
    assert {key: [started[name][key] for name in names] for key in handed} == handed
    assert len({started[name]["metrics_port"] for name in ("scheduler", *names)}) == 1 + len(names)
    upstreams = [upstream.split("=")[0] for upstream in started["gateway"]["metrics_upstreams"]]
    assert upstreams == ["serve", "scheduler", *names]
    secrets, addresses = ({started[name][key] for name in names} for key in ("fabric_secret_file", "lockstep_address"))
    assert (len(secrets), len(addresses)) == (1, 1), "of all workers"
    assert (None in secrets, None in addresses) == ("layout" not in options, options.get("layout") != "lockstep")
    assert started["scheduler"]["expert_groups"] == (3 if options.get("layout") == "colocated" else None)
    ended = [name.partition("-")[0] for name in names_in(home, "stopped")]
    assert len(ended) == 2 + len(names)
    assert ended == sorted(ended, key=list(COMMANDS).index), "experts after those who use them"


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, None),
        ({"trace_sample": 1.0}, "traces"),
        ({"trace_sample": 1.0, "otlp_endpoint": "http://collector:4318"}, None),
    ],
)
async def test_traces_without_a_place_go_into_a_folder_of_the_server(
    home: Path, options: dict[str, Any], place: str | None
) -> None:
    assert await _run(_until_started(home, 3), **options) == 0
    folders = {values["trace_folder"] for values in settings_in(home).values()}
    assert len(folders) == 1, "of all roles"
    (folder,) = folders
    assert (folder and Path(folder).name) == place
    assert folder is None or "expertmesh-serve-" in folder, "it ends with the server"


async def test_expert_workers_are_stopped_together(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    for index in range(4):
        (home / f"experts-{index}.stubborn").touch()

    four = _EXPERTS | {"expert_workers": 4}
    assert await _run(_until_started(home, 7), drain_timeout=0.0, stop_margin_s=2.0, **four) == 0
    killed = {record.getMessage(): record.created for record in caplog.records if "killing it" in record.getMessage()}
    assert sorted(killed) == [f"experts-{index} did not stop in 2 s; killing it" for index in range(4)]
    assert max(killed.values()) - min(killed.values()) < 2, "one after the other they end 2 s apart"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layout": "colocated", "workers": 0}, "At least one attention worker is needed"),
        ({"layout": "colocated", "workers": 2, "expert_groups": 3}, "--expert-groups 3 exceeds the 2 seats"),
        (
            {"layout": "colocated", "workers": 2, "overlap": "on"},
            "--overlap on cannot be combined with --layout colocated",
        ),
        ({"layout": "colocated", "workers": 2, "expert_slices": 2}, "--expert-slices 2 cannot be combined"),
        ({"layout": "colocated", "expert_workers": 2}, "--expert-workers 2 does not apply to --layout colocated"),
        ({"expert_workers": 2}, "--layout local, which has none. Add --layout disaggregated"),
        ({"layout": "disaggregated", "expert_workers": 0}, "At least one expert worker is needed"),
        ({"layout": "lockstep", "expert_groups": 2}, "does not apply to --layout lockstep, which has no shard groups"),
        ({"model": None}, "No model is given"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_starts(
    home: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        await _supervisor(**options).run(asyncio.Event())
    assert not notes_in(home)


async def test_what_cannot_work_here_is_refused_before_anything_starts(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port} on 127.0.0.1 is in use.*--port N"):
            await _supervisor(port=port).run(asyncio.Event())
    with pytest.raises(CheckpointError):
        await Supervisor(Settings(model=home / "none")).run(asyncio.Event())
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.1"):
        check_port("203.0.113.1", 0)
    assert not notes_in(home)


@pytest.mark.parametrize("terminal", [True, False])
async def test_a_server_that_others_reach_makes_a_key_where_there_is_none(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """It is shown on a terminal, and stays out of logs that are kept elsewhere."""
    found: list[str] = []

    async def read_key(_: str) -> None:
        found.extend(
            file.read_text() for file in Path(tempfile.gettempdir()).glob(f"expertmesh-serve-*-{os.getpid()}.*/api-key")
        )

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert await _run(read_key, host="0.0.0.0") == 0
    keys = {role: values["api_key"] for role, values in settings_in(home).items()}
    assert keys.pop("gateway").startswith("sk-")
    assert set(keys.values()) == {None}, "others have no use for it"
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    made = settings_in(home)["gateway"]["api_key"]
    assert (made in warning) == terminal
    assert found == ([] if terminal else [made])
    assert "Authorization: Bearer KEY" in warning


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, None),
        ({"host": "0.0.0.0", "auth": "off"}, None),
        ({"host": "0.0.0.0", "api_keys_file": "keys.yaml"}, None),
        ({"host": "0.0.0.0", "api_key": "sk-of-mine"}, "sk-of-mine"),
        ({"api_key": "sk-of-mine"}, "sk-of-mine"),
    ],
)
async def test_no_key_is_made_where_it_is_not_needed(
    home: Path, values: dict[str, Any], key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert await _run(_nothing, **values) == 0
    assert settings_in(home)["gateway"]["api_key"] == key
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    need = "an API key" if key or "api_keys_file" in values else "no API key"
    assert f"/metrics; clients need {need}" in caplog.text


async def test_a_second_signal_does_not_wait(home: Path, offspring: Callable[[], list[psutil.Process]]) -> None:
    for role in _ALONE:
        (home / f"{role}.stubborn").touch()
    stop = asyncio.Event()
    supervisor = _supervisor()
    running = asyncio.create_task(supervisor.run(stop))
    await until_started(home, 3)
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


async def test_an_external_redis_is_used_as_it_is_and_learns_of_a_worker_that_ended(home: Path, redis_url: str) -> None:
    async def during(_: str) -> None:
        await until_started(home, 3)
        attention = next(note for note in notes_in(home) if note["role"] == "attention")
        await killed_and_reported(redis_url, "of-a-server", attention)

    assert await _run(during, redis_url=redis_url, namespace="of-a-server") == 0
    assert {note["settings"]["redis_url"] for note in notes_in(home)} == {redis_url}


async def test_the_file_with_its_url_is_handed_on_and_not_what_is_in_it(home: Path, redis_url: str) -> None:
    file = home / "url"
    file.write_text(redis_url)
    assert await _run(_nothing, redis_url=redis_url, redis_url_file=file) == 0
    for note in notes_in(home):
        assert (note["settings"]["redis_url"], note["settings"]["redis_url_file"]) == (redis_url, str(file))


_SERVE = """
import asyncio
from services.config import Settings
from services.runtime import run_process
from services.supervisor import Supervisor

commands = dict.fromkeys(("gateway", "scheduler", "attention"), ("-m", "fake_role"))
supervisor = Supervisor(Settings(model="m", port=0), commands=commands, check=lambda _: None)
run_process(supervisor.run, force=supervisor.kill)
"""


@pytest.mark.usefixtures("home", "temporary")
def test_no_orphan_after_kill_9_of_the_supervisor() -> None:
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


def test_folders_of_killed_supervisors_are_swept(temporary: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with RunFolder() as folder:
        here = f"expertmesh-serve-{folder.path.name.split('-')[2]}-"
    left = temporary / f"{here}{dead.pid}-abc"
    living = temporary / f"{here}{os.getpid()}-abc"
    before = temporary / f"{here}{os.getpid()}.1-abc"
    elsewhere = temporary / f"expertmesh-serve-00000000-{dead.pid}-abc"
    for each in (left, living, before, elsewhere):
        each.mkdir()
    with RunFolder() as folder:
        assert not left.exists()
        assert living.exists()
        assert elsewhere.exists(), "of another container or host that has the same folder of temporary files"
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
