"""`expertmesh top` beside a whole server: one frame with experts at work, Redis away, and a terminal left by Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from testkit.pocket.answers import serve_pocket
from testkit.processes.servers import Server, bench, free_port
from testkit.waiting import until

TOP = [sys.executable, "-m", "services", "top"]
WORKERS, LEASE_S = 2, 6.0


def one_frame(url: str, columns: int = 160, *more: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": str(columns)}
    command = [*TOP, "--once", "--redis-url", url, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def keep_busy(server: Server, until: list[bool]) -> None:
    body = {"model": "pocket", "prompt": "define: sea", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    while not until:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()


def column(frame: str, title: str, key: str) -> list[str]:
    """What stands under ``title`` in the table that begins with ``key``, word by word."""
    lines = frame.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == [key])
    end = lines[at].index(title) + len(title)
    rows = []
    for line in lines[at + 1 :]:
        if not line.strip():
            break
        rows.append(line[:end].split()[-1])
    return rows


def test_one_frame_shows_what_runs_and_says_what_is_away(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with bench(tmp_path) as stage, ThreadPoolExecutor(4) as pool:
        redis = stage.redis(port=port)
        experts = {"layout": "disaggregated", "expert_workers": WORKERS, "expert_groups": 2}
        server = serve_pocket(stage, redis_url=url, lease=LEASE_S, **experts)
        until(lambda: server.metric("expertmesh_expert_seats") == WORKERS, "all expert workers are in the table")
        done: list[bool] = []
        asking = [pool.submit(keep_busy, server, done) for _ in range(4)]
        try:
            until(lambda: server.metric("expertmesh_experts_rows_total") > 0, "experts compute")
            shown = one_frame(url, 160, "--interval", "3")
        finally:
            done.append(True)
        for future in asking:
            future.result()
        assert shown.returncode == 0, shown.stderr
        assert column(shown.stdout, "group", "seat") == ["0", "1"]
        assert all(int(rows.replace(",", "")) > 0 for rows in column(shown.stdout, "rows/s", "seat"))
        assert column(shown.stdout, "seats", "shard") == ["1", "1"]
        assert int(column(shown.stdout, "tokens/s", "attention")[0]) > 0
        assert shown.stdout.count("ready") == WORKERS
        assert "imbalance" in shown.stdout
        narrow = one_frame(url, 30).stdout
        assert max(map(len, narrow.splitlines())) <= 30
        server.proc.stop()  # without its Redis it would take its time
        redis.kill9()
        away = one_frame(url)
        assert (away.returncode, "REDIS IS AWAY" in away.stdout) == (1, True), away


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_left_as_it_was(number: signal.Signals) -> None:
    """Also while Redis is away."""
    ours, theirs = pty.openpty()
    command = [*TOP, "--redis-url", f"redis://127.0.0.1:{free_port()}/0", "--interval", "0.1"]
    env = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = read_until(ours, b"REDIS IS AWAY")
    process.send_signal(number)
    shown += read_until(ours, b"\x1b[?1049l")
    assert process.wait(30) == 0
    os.close(ours)
    assert shown.index(b"\x1b[?1049h") < shown.rindex(b"\x1b[?1049l")
    assert b"Traceback" not in shown


def read_until(terminal: int, wanted: bytes, timeout_s: float = 60) -> bytes:
    os.set_blocking(terminal, False)
    seen, end = b"", time.monotonic() + timeout_s
    while wanted not in seen:
        assert time.monotonic() < end, seen
        try:
            seen += os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.02)
    return seen
