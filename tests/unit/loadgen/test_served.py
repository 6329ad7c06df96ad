"""A server as a child process: used once it is ready, ended with its context."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx
import pytest
from testkit.processes.servers import free_port

from loadgen.errors import AddressTaken, ServerEnded
from loadgen.served import served

SLOW_START = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 else 503)
        self.end_headers()
        self.wfile.write(f"{Handler.asked} {os.environ['SERVED']} {sys.argv[1:4]}".encode())

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_it_is_there_once_it_is_ready_and_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "expertmesh").mkdir()
    for name, text in (("__init__", ""), ("__main__", SLOW_START)):
        (tmp_path / f"expertmesh/{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with served(["--model", "m"], port=free_port(), env={"SERVED": "yes"}) as server:
        assert httpx.get(server.url).text == "4 yes ['serve', '--model', 'm']"
        assert os.getpgid(server.pid) == server.pid, "Ctrl-C in a terminal is not its own"
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_server_of_others_is_not_taken_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressTaken, match=r"Something answers at .* already"), served([], port=port):
            pytest.fail("it is another")


def test_one_that_ends_is_not_waited_for() -> None:
    with pytest.raises(ServerEnded, match="The server ended with 2"), served(["--no-such-option"], port=free_port()):
        pytest.fail("it is not there")
