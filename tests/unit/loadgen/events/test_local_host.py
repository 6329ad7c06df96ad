"""Events on this machine: signals to processes that are found by the folder of their server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadgen.events.host import EventImpossible
from loadgen.events.local import LocalHost
from loadgen.events.plan import planned
from services.config import Settings
from services.runtime.local_servers import announce
from services.runtime.run_folder import RunFolder

URL = "http://127.0.0.1:8100"
Start = Callable[..., "subprocess.Popen[bytes]"]

pytestmark = pytest.mark.usefixtures("temporary")


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    with RunFolder() as made:
        announce(made, Settings(model=Path("/models/m")), url=URL, redis_url="unix:///a")
        yield made


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do nothing, with an argument as roles have it."""
    with ExitStack() as running:

        def started(*words: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
            code = "import time; print(flush=True); time.sleep(600)"
            process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=cwd, stdout=subprocess.PIPE)
            running.callback(process.communicate)
            running.callback(process.kill)
            assert process.stdout
            process.stdout.readline()
            return process

        yield started


async def test_a_process_is_found_by_its_name_and_killed(folder: RunFolder, start: Start) -> None:
    ours = start("--config", str(folder.path / "experts-1.yaml"))
    other = start("--config", "/elsewhere/experts-1.yaml")
    host = LocalHost(URL)
    assert await host.find(planned("0:kill:experts-1")) == f"process {ours.pid}"
    assert await host.act(planned("0:kill:experts-1")) == f"process {ours.pid}"
    assert ours.wait(60) == -signal.SIGKILL
    assert other.poll() is None


async def test_a_drain_asks_the_process_to_end(folder: RunFolder, start: Start) -> None:
    ours = start("--config", str(folder.path / "attention.yaml"))
    await LocalHost(f"{URL}/v1").act(planned("0:drain:attention"))
    assert ours.wait(60) == -signal.SIGTERM


async def test_a_pause_stops_it_and_lets_it_go_on(folder: RunFolder, start: Start) -> None:
    ours = start("--config", str(folder.path / "gateway.yaml"))
    began = time.perf_counter()
    await LocalHost(URL).act(planned("0:pause:gateway=200ms"))
    assert time.perf_counter() - began >= 0.2
    assert Path(f"/proc/{ours.pid}/stat").read_text().rpartition(")")[2].split()[0] in "SR"


async def test_redis_is_the_process_in_its_folder(folder: RunFolder, start: Start) -> None:
    (folder.path / "redis").mkdir()
    redis = start(cwd=folder.path / "redis")
    await LocalHost(URL).act(planned("0:kill:redis"))
    assert redis.wait(60) == -signal.SIGKILL


async def test_who_is_not_there_is_said_with_who_is(folder: RunFolder, start: Start) -> None:
    start("--config", str(folder.path / "experts-0.yaml"))
    start("--config", str(folder.path / "gateway.yaml"))
    with pytest.raises(
        EventImpossible, match=r"no process experts-7 of a server at http://127\.0\.0\.1:8100"
    ) as caught:
        await LocalHost(URL).find(planned("0:kill:experts-7"))
    assert caught.value.message.endswith(" There are experts-0, gateway.")
    with pytest.raises(EventImpossible, match="For a release on Kubernetes give --release"):
        await LocalHost("http://127.0.0.1:1").find(planned("0:kill:gateway"))


@pytest.mark.usefixtures("folder")
async def test_a_fixed_number_of_processes_cannot_be_scaled() -> None:
    for way in (LocalHost(URL).find, LocalHost(URL).act):
        with pytest.raises(EventImpossible, match="attention cannot be scaled"):
            await way(planned("0:scale:attention=3"))


async def test_a_command_runs_in_a_shell_and_its_last_line_says_why_it_failed(tmp_path: Path) -> None:
    host = LocalHost(URL)
    assert await host.act(planned(f"0:run:echo made > {tmp_path}/a && cat {tmp_path}/a")) == "made"
    with pytest.raises(EventImpossible, match=r"ended with 3: really$"):
        await host.act(planned("0:run:echo no >&2; echo really >&2; exit 3"))
