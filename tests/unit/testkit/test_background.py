"""Tests that fail in the background are red, each by itself."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.processes.background import ended

ROOT = Path(__file__).parents[3]
TESTS = """
import asyncio, gc, threading
import uvloop

kept = []

async def fail():
    raise ValueError("here")

async def test_task():
    kept.append(asyncio.create_task(fail()))
    await asyncio.sleep(0)

def test_own_loop():
    async def main():
        asyncio.create_task(fail())
        await asyncio.sleep(0)
    asyncio.run(main())

def test_uvloop():
    async def main():
        asyncio.create_task(fail())
        await asyncio.sleep(0)
    uvloop.run(main())
    gc.collect()

async def test_callback():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

def test_thread():
    def look():
        assert False
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

async def test_awaited():
    task = asyncio.create_task(fail())
    await asyncio.gather(task, return_exceptions=True)
"""


def test_what_fails_in_the_background_fails_its_test_alone(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    plugins = ["-p", "testkit.processes.background", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"]
    options = ["-q", "-rA", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), *plugins]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )
    red = set(re.findall(r"^(?:ERROR|FAILED) \S*::(\w+)", run.stdout, re.MULTILINE))
    assert red == {"test_task", "test_own_loop", "test_uvloop", "test_callback", "test_thread"}, run.stdout + run.stderr


async def _die(error: BaseException) -> None:
    raise error


async def test_tasks_are_ended_strictly() -> None:
    endless = asyncio.ensure_future(asyncio.Event().wait())
    await ended([endless])
    assert endless.cancelled()
    dead = [asyncio.ensure_future(_die(error)) for error in (ValueError("a"), KeyError("b"))]
    await asyncio.sleep(0)
    await ended(dead, ValueError, KeyError)
    with pytest.raises(KeyError):
        await ended(dead, ValueError)
    with pytest.raises(ExceptionGroup):
        await ended(dead)
