"""`expertmesh observe` with a real Prometheus: a server that starts later is found, its dashboards have numbers, and
nothing is left at the end, however it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from testkit.processes.servers import Bench, Proc, Server, bench
from testkit.waiting import until

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
]
TTFT = "Time to first token (TTFT)"
COMMAND = [sys.executable, "-m", "services"]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files of this test's own: servers of others are not found in it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def observe(stage: Bench) -> tuple[Proc, str, str]:
    """The process, and the addresses of the dashboards and of Prometheus."""
    proc = stage.start("observe", [*COMMAND, "observe"])
    until(lambda: "Ctrl-C" in proc.log() or proc.popen.poll() is not None, "its pages are served")
    found = dict(re.findall(r"^(dashboards|Prometheus) +(http://\S+)$", proc.log(), re.M))
    assert found.keys() == {"dashboards", "Prometheus"}, proc.log()
    return proc, found["dashboards"], found["Prometheus"]


def prometheus_of(proc: Proc) -> psutil.Process:
    [child] = psutil.Process(proc.pid).children()
    assert child.name() == "prometheus"
    return child


def ask(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()


def panel(text: str, title: str) -> str:
    """The part of a page that is the panel."""
    [found] = re.findall(rf'<section class="panel [^>]*><h3[^>]*>{re.escape(title)}</h3>.*?</section>', text, re.S)
    return str(found)


def test_a_server_that_starts_later_is_on_the_dashboards(own: Path, tiny: Path, tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        proc, pages, prometheus = observe(stage)
        rules = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
        assert rules
        assert "no server of yours runs on this machine yet" in proc.log()
        assert "no data" in panel(httpx.get(f"{pages}/overview").text, "Tokens")
        server = stage.serve(tiny, served_model_name="tiny", dtype="float32", kv_blocks=512)

        def is_drawn(board: str, title: str) -> bool:
            answer = httpx.get(f"{pages}/{board}", params={"from": "-5m"}, timeout=60)
            return 'class="line"' in panel(answer.text, title)

        def numbers_are_drawn() -> bool:
            ask(server)
            return is_drawn("overview", "Tokens") and is_drawn("latency", TTFT)

        until(numbers_are_drawn, "tokens and latencies are drawn", limit_s=120, every_s=1)
        out = tmp_path / "boards"
        words = [
            "--prometheus",
            prometheus,
            "--from",
            "-5m",
            "--out",
            str(out),
            "--var",
            f"release=tiny:{server.url[-5:]}",
        ]
        ran = subprocess.run([*COMMAND, "dashboards", *words], capture_output=True, text=True, timeout=120, check=True)
        written = {file.stem for file in out.glob("*.html")}
        assert {"index", "overview", "latency"} < written
        assert 'class="fault"' not in (out / "index.html").read_text(), ran.stderr
        assert "no data" not in panel((out / "latency.html").read_text(), TTFT)
        child = prometheus_of(proc)
        proc.popen.send_signal(signal.SIGINT)
        assert proc.popen.wait(60) == 0
        assert not child.is_running()
        assert list(own.glob("expertmesh-*/prometheus.yml")) == []


def test_prometheus_ends_with_it_and_it_with_prometheus(own: Path, tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        killed, _, _ = observe(stage)
        child = prometheus_of(killed)
        killed.kill9()

        def gone() -> bool:
            with suppress(psutil.NoSuchProcess):
                return child.status() == psutil.STATUS_ZOMBIE
            return True

        until(gone, "Prometheus has ended")
        bereft, _, _ = observe(stage)
        os.kill(prometheus_of(bereft).pid, signal.SIGKILL)
        assert bereft.popen.wait(60) == 1
        assert "Prometheus ended with exit code -9" in bereft.log()
        assert list(own.glob("expertmesh-*")) == [], "the next one removes what the first has left"
