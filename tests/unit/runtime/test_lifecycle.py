"""From argv to an exit code, in real processes: signals, start-up errors, crashes, the parent's death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.runtime import CRASHED, FORCED

_ROLE = """
import asyncio, sys
from services.errors import FingerprintMismatch
from services.runtime import run_role

async def main(settings, stop):
    {body}

sys.exit(run_role("scheduler", main, sys.argv[1:]))
"""
_UNTIL_STOPPED = """
    print("up", flush=True)
    await stop.wait()
    print("drained", flush=True)
"""
_NEVER_DRAINS = """
    print("up", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.sleep(60)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a role with the given body; killed with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(body: str, *argv: str) -> subprocess.Popen[str]:
        script = tmp_path / "role.py"
        script.write_text(_ROLE.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip()))
        command = [sys.executable, str(script), "--redis-url", "redis://h", *argv]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains(start: Start, number: signal.Signals) -> None:
    process = start(_UNTIL_STOPPED)
    assert _line(process) == "up"
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("drained\n", "")
    assert process.returncode == 0


def test_the_second_signal_ends_it_at_once(start: Start) -> None:
    process = start(_NEVER_DRAINS)
    assert _line(process) == "up"
    process.send_signal(signal.SIGINT)
    assert _line(process) == "draining"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == FORCED


_MISMATCH = 'raise FingerprintMismatch("another model.", hint="Do this.")'
_IN_A_GROUP = f"""
    async def fail():
        {_MISMATCH}
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
"""


@pytest.mark.parametrize(
    ("body", "argv", "code", "said"),
    [
        (_MISMATCH, ["--log-format", "text"], 5, "another model. Do this."),
        (_IN_A_GROUP, ["--log-format", "text"], 5, "another model. Do this."),
        ("pass", ["--prot", "1"], 2, "expertmesh scheduler: Unknown option --prot."),
    ],
    ids=["start-up", "in a group", "option"],
)
def test_a_start_up_error_is_one_line_and_its_code(
    start: Start, body: str, argv: list[str], code: int, said: str
) -> None:
    process = start(body, *argv)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (code, 1)
    assert said in err


def test_a_crash_has_its_traceback_and_its_code(start: Start) -> None:
    process = start("1 / 0", "--log-format", "text")
    _, err = process.communicate(timeout=60)
    assert process.returncode == CRASHED
    assert "ZeroDivisionError" in err


_LEAVES_WORK = """
    import torch
    from services.runtime import in_daemon

    def work():
        while True:
            torch.ones(1000).add_(1)

    working = asyncio.ensure_future(in_daemon("work", work))
    await asyncio.sleep(0.2)
    {end}
"""


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("1 / 0", CRASHED)])
def test_work_left_behind_inside_torch_does_not_change_the_code(start: Start, end: str, code: int) -> None:
    process = start(_LEAVES_WORK.format(end=end))
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "terminate called" not in err
    assert ("ZeroDivisionError" in err) == (code == CRASHED)


_PARENT = """
import asyncio, sys
from services.runtime import die_with_parent, watch_parent

async def main():
    argv = [sys.executable, "-c", CHILD]
    await asyncio.create_subprocess_exec(*argv, start_new_session=True, preexec_fn=PREEXEC)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("child", "preexec"),
    [
        pytest.param(
            "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
            "die_with_parent()",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's"),
        ),
        (
            "import os, time; from services.runtime import watch_parent; watch_parent(os.getppid()); "
            "print(os.getpid(), flush=True); time.sleep(60)",
            "None",
        ),
    ],
    ids=["kernel", "watch"],
)
def test_a_child_ends_with_a_parent_that_was_killed(child: str, preexec: str) -> None:
    script = _PARENT.replace("CHILD", repr(child)).replace("PREEXEC", preexec)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int(_line(parent)))  # it says so once it is watching
    assert process.is_running()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    try:
        process.wait(timeout=30)
    finally:
        if process.is_running():
            process.kill()
        parent.communicate()
