"""When a load begins: once the server serves, at a time that all parts know, and with what happens meanwhile."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from testkit.waiting import until

from loadgen.cli.options import NOTICE_S, start
from loadgen.command import main
from loadgen.errors import CUT_SHORT, OK, USAGE, ServerUnusable
from loadgen.preflight import find_server
from loadgen.results import Run, read_run

Answers = Callable[[str, int], int]
"""Status of the answer to a path that is asked for the n-th time."""


@pytest.fixture
def serving(request: pytest.FixtureRequest) -> Callable[[Answers], str]:
    """Starts a server that lists one model, and answers with the statuses that it is given."""

    def served(answers: Answers) -> str:
        counts: dict[str, itertools.count[int]] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = next(counts.setdefault(self.path, itertools.count()))
                self.send_response(answers(self.path, number))
                self.end_headers()
                self.wfile.write(b'{"data": [{"id": "m"}]}')

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        request.addfinalizer(lambda: (server.shutdown(), thread.join(), server.server_close()))
        return f"http://127.0.0.1:{server.server_port}"

    return served


def test_a_server_that_is_not_ready_is_waited_for(serving: Callable[[Answers], str]) -> None:
    url = serving(lambda path, number: 503 if path == "/ready" and number < 2 else 200)
    assert find_server(url, None, None, None, wait_s=60.0).model == "m"


def test_a_server_without_a_page_of_readiness_serves(serving: Callable[[Answers], str]) -> None:
    url = serving(lambda path, _: 404 if path == "/ready" else 200)
    assert find_server(url, None, None, None, wait_s=60.0).model == "m"


def test_without_waiting_it_is_asked_once(serving: Callable[[Answers], str]) -> None:
    url = serving(lambda _, number: 503 if number == 0 else 200)
    with pytest.raises(ServerUnusable, match="answers 503"):
        find_server(url, None, None, None)


def test_waiting_ends(serving: Callable[[Answers], str]) -> None:
    with pytest.raises(ServerUnusable, match="is not ready to serve"):
        find_server(serving(lambda *_: 503), None, None, None, wait_s=0.5)


@pytest.mark.parametrize(
    ("text", "now", "at"), [("next:60", 1000.0, 1020.0), ("next:60", 1015.0, 1080.0), ("7", 9.0, 7.0)]
)
def test_parts_agree_on_the_next_full_minute(text: str, now: float, at: float) -> None:
    assert start(text).at(now) == at
    if text.startswith("next"):
        assert at - now >= NOTICE_S


@pytest.mark.parametrize("text", ["next:", "next:0", "soon", "-1", "inf", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write Unix seconds, or next:60"):
        start(text)


@pytest.fixture
def null_server() -> Iterator[str]:
    """A server without a model, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import sys; from loadgen.command import main; sys.exit(main())"
    words = ["null", "--port", str(port), "--first-token", "0.02", "--token-gap", "0.01"]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.communicate()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_has_its_events_on_its_own_time_axis(null_server: str, tmp_path: Path, processes: int) -> None:
    out, page = tmp_path / "run.json", tmp_path / "run.html"
    words = [null_server, "--rate", "20", "--duration", "3", "--output-tokens", "8", "--lag-limit", "60000ms"]
    words += ["--processes", str(processes), "--event", f"1s:run:date +%s.%N > {tmp_path}/at && echo done"]
    words += ["--out", str(out), "--html", str(page), "--quiet", "--gpus", "2"]
    assert main(["run", *words]) == OK
    run: Run = read_run(out)
    [event] = run.events
    assert (event.detail, event.error) == ("done", None)
    assert event.began_s is not None
    happened = float((tmp_path / "at").read_text()) - run.began_at
    assert event.began_s <= happened <= (event.ended_s or 0.0)
    assert run.settings["gpus"] == 2.0
    gaps = sum(each.itl.count for each in run.timeline if each.itl is not None)
    assert gaps == run.latency["itl"].count > 0
    assert "1: run date" in page.read_text(encoding="utf-8")


def test_a_run_does_not_begin_where_an_event_cannot_happen(
    null_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [null_server, "--rate", "20", "--duration", "3", "--out", str(tmp_path / "run.json")]
    assert main(["run", *words, "--event", "1s:kill:experts-1"]) == USAGE
    assert main(["run", *words, "--event", "9s:run:true"]) == USAGE
    said = capsys.readouterr().err
    assert "There is no process experts-1" in said
    assert "comes after the load, which takes 3 s" in said
    assert not (tmp_path / "run.json").exists()


def test_passwords_of_urls_are_not_kept(null_server: str, tmp_path: Path) -> None:
    words = [null_server, "--rate", "20", "--duration", "1", "--lag-limit", "60000ms", "--quiet"]
    main(["run", *words, "--label", "see http://user:hush@host/x", "--out", str(tmp_path / "run.json")])
    settings = read_run(tmp_path / "run.json").settings
    assert "hush" not in str(settings)
    assert "http://***@host/x" in settings["command"][-3]


@pytest.mark.parametrize("more", [("--processes", "2"), ("--event", "60s:run:true")], ids=["processes", "events"])
def test_who_interrupts_a_load_sees_what_it_saw_and_no_traceback(
    null_server: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of the terminal."""
    begun = tmp_path / "begun"
    words = ["run", null_server, "--rate", "5", "--duration", "90", "--event", f"0:run:touch {begun}", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "expertmesh.load", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    until(begun.exists, "the load has begun", limit_s=60, every_s=0.1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=30)[0].decode()
    assert "Traceback" not in said
    assert "SIGINT ended it after" in said.splitlines()[0]
    assert process.returncode == CUT_SHORT
