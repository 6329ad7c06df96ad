"""Stands in for every role: notes how it was started, answers /ready as the gateway, fails on request.

``FAKE_DIR/<role>.fail`` holds exit codes, one per start, which it ends with (once as many roles have started as
``FAKE_DIR/<role>.fails-after`` says); without one left it runs until SIGTERM, or until
``FAKE_DIR/<role>.end`` says with which code it ends; after SIGTERM ``FAKE_DIR/<role>.last`` says that. With
``FAKE_DIR/pages`` the others answer, too: /ready with what ``FAKE_DIR/<role>.missing`` says, /metrics with one series.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from services.config import load_settings

home = Path(os.environ["FAKE_DIR"])
role = Path(sys.argv[2]).stem


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        up = {json.loads(line)["role"] for line in (home / "notes").read_text().rpartition("\n")[0].splitlines()}
        self.send_response(503 if (home / "not-ready").exists() or len(up) < 3 else 200)
        self.end_headers()
        self.wfile.write(b"waiting for a worker")

    def log_message(self, *_: object) -> None:
        pass


class Pages(Ready):
    def do_GET(self) -> None:
        waits = home / f"{role}.missing"
        missing = self.path == "/ready" and waits.exists()
        self.send_response(503 if missing else 200)
        self.end_headers()
        self.wfile.write(f"waiting for {waits.read_text()}".encode() if missing else b"# TYPE rows gauge\nrows 5\n")


def note(what: str, **details: object) -> None:
    with (home / "notes").open("a") as out:
        out.write(json.dumps({"role": role, "what": what, "pid": os.getpid(), "at": time.time(), **details}) + "\n")


def stop(*_: object) -> None:
    if not (home / f"{role}.stubborn").exists():
        time.sleep(0.1)
        note("stopped")
        last = home / f"{role}.last"
        os._exit(int(last.read_text()) if last.exists() else 0)


signal.signal(signal.SIGTERM, stop)
settings = load_settings(sys.argv[1:], role=role.split("-")[0])  # type: ignore[arg-type]
note(
    "started",
    argv=sys.argv[1:],
    mode=oct(Path(sys.argv[2]).stat().st_mode),
    session=os.getsid(0),
    environment=sorted(name for name in os.environ if name.startswith("EXPERTMESH_")),
    settings=settings.model_dump(mode="json"),
)
codes = home / f"{role}.fail"
if codes.exists() and (left := codes.read_text().split()):
    codes.write_text(" ".join(left[1:]))
    after = home / f"{role}.fails-after"
    while after.exists() and (home / "notes").read_text().count('"started"') < int(after.read_text()):
        time.sleep(0.02)
    if left[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(left[0]))
if role == "gateway":
    server = HTTPServer((settings.host, settings.port), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
elif (home / "pages").exists() and settings.metrics_port:
    pages = HTTPServer((settings.host, settings.metrics_port), Pages)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
while True:
    time.sleep(0.05)
    if (end := home / f"{role}.end").exists():
        code = int(end.read_text())
        end.unlink()
        os._exit(code)
