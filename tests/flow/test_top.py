"""`expertmesh top` beside a whole server: a frame with experts at work, Redis away, a terminal left by Ctrl-C or q."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    body = {"model": "pocket", "prompt": "define: sea", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    while not until:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()


def shows_latencies(url: str, found: dict[str, Any]) -> bool:
    """Puts a frame into ``found``."""
    found.update(json.loads(one_frame(url, 160, "--json", "--interval", "3").stdout))
    return all(found[name] for name in ("ttft", "tpot", "itl"))


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
            found: dict[str, Any] = {}
            until(lambda: shows_latencies(url, found), "requests begin and end between two readings")
        finally:
            done.append(True)
        for future in asking:
            future.result()
        assert shown.returncode == 0, shown.stderr
        assert sorted(column(shown.stdout, "group", "experts")) == ["0", "1"]
        assert all(int(rows.replace(",", "")) > 0 for rows in column(shown.stdout, "rows/s", "experts"))
        assert column(shown.stdout, "seats", "shard") == ["1", "1"]
        assert int(column(shown.stdout, "tokens/s", "attention")[0]) > 0
        assert shown.stdout.count("ready") == WORKERS
        assert [worker["name"] for worker in found["workers"]] == ["attention"]
        assert found["workers"][0]["kv_tokens"] > 0
        assert [seat["name"] for seat in found["seats"]] == ["experts-0", "experts-1"]
        assert "imbalance" in shown.stdout
        narrow = one_frame(url, 30).stdout
        assert max(map(len, narrow.splitlines())) <= 30
        server.proc.stop()  # without its Redis it would take its time
        redis.kill9()
        away = one_frame(url)
        assert (away.returncode, "REDIS IS AWAY" in away.stdout) == (1, True), away


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM, "q"])
def test_a_terminal_is_left_as_it_was(way: signal.Signals | str) -> None:
    """Also while Redis is away."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [*TOP, "--redis-url", f"redis://127.0.0.1:{free_port()}/0", "--interval", "0.1"]
    env = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    shown = read_until(ours, b"REDIS IS AWAY")
    if isinstance(way, str):
        os.write(ours, way.encode())
    else:
        process.send_signal(way)
    shown += read_until(ours, b"\x1b[?1049l")
    assert process.wait(30) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
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
