"""What processes that stand in for the roles (unit/supervisor/fakes) noted of themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from services.config import Role
from services.messages import WorkerInfo
from services.queue.connect import connect
from services.queue.keys import Keys
from services.queue.scheduler_side import SchedulerQueue
from services.queue.worker_side import WorkerQueue
from services.runtime.address import incarnations_of
from services.supervisor.policy import RestartPolicy
from testkit.waiting import LIMIT_S, eventually

Notes = list[dict[str, Any]]
COMMANDS: dict[Role, tuple[str, ...]] = dict.fromkeys(
    ("gateway", "scheduler", "attention", "colocated", "experts"), ("-m", "fake_role")
)


def notes_in(home: Path, what: str = "started") -> Notes:
    """In the order in which they were made, those being written left out."""
    path = home / "notes"
    written = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [note for note in map(json.loads, written.splitlines()) if note["what"] == what]


def names_in(home: Path, what: str = "started") -> list[str]:
    return [note["role"] for note in notes_in(home, what)]


def settings_in(home: Path) -> dict[str, dict[str, Any]]:
    """By name; of several lives those of the last one."""
    return {note["role"]: note["settings"] for note in notes_in(home)}


async def until_started(home: Path, count: int) -> None:
    await eventually(lambda: len(notes_in(home)) == count)


def few_tries() -> RestartPolicy:
    return RestartPolicy(first_delay_s=0.01, max_failures=3)


async def killed_and_reported(redis_url: str, namespace: str, note: dict[str, Any]) -> None:
    """Returns once Redis knows no more of the process that left ``note``, which is killed here: its lease is long."""
    redis, keys = connect(redis_url), Keys(namespace)
    page = f"http://127.0.0.1:{note['settings']['metrics_port']}/metrics"
    info = WorkerInfo(
        id=f"{incarnations_of(note['pid'])}0", model="m", fingerprint="f", kv_tokens=1, max_num_seqs=1, max_model_len=1,
        host=socket.gethostname(), pid=note["pid"], version="0", metrics_url=page,
    )  # fmt: skip
    try:
        await WorkerQueue(redis, keys).register(info, 600, credit_tokens=1, credit_requests=1)
        os.kill(note["pid"], signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while await SchedulerQueue(redis, keys).workers():
                await asyncio.sleep(0.02)
    finally:
        await redis.aclose()
