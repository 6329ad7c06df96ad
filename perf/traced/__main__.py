"""Which of this project's files one request enters, on its way through every process of a server.

    python -m perf.traced [--layout local|shared] [--max-files 60]

Starts ``expertmesh serve`` with a small model on the CPU, sends it one streamed completion, and prints every Python
file whose functions are called from the request's arrival to its last token, and every Lua script that is run, in the
order of the first call. Files that are also entered in as long a time without a request (heartbeats, metrics) are left
out. Exit code 1: there are more files than ``--max-files``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from loadgen.served import Served, served

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/pocket-moe/model"
LAYOUTS = {
    "local": ("--workers", "1"),
    "shared": ("--workers", "1", "--layout", "disaggregated", "--expert-workers", "1", "--fabric-shared", "host"),
}
OURS = ("services/", "kernels/moe_kernels/")
WRITTEN_S = 20.0


def traced(server: Served, out: Path, seconds: float | None, model: str) -> dict[str, float]:
    """File -> when it was first entered; while nothing happens for ``seconds``, or else while one request is served."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    pythons = [one for one in processes if "python" in Path(one.exe()).name]
    for file in out.iterdir():
        file.unlink()
    for process in pythons:
        process.send_signal(signal.SIGUSR1)
    if seconds is None:
        complete(server.url, model)
    else:
        time.sleep(seconds)
    for process in pythons:
        process.send_signal(signal.SIGUSR2)
    until = time.monotonic() + WRITTEN_S
    while len(list(out.glob("*.json"))) < len(pythons):
        if time.monotonic() > until:
            sys.exit("a process did not say which files it entered")
        time.sleep(0.05)
    found: dict[str, float] = {}
    for file in out.glob("*.json"):
        for name, at in json.loads(file.read_text())["files"].items():
            if name.startswith(OURS):
                found[name] = min(at, found.get(name, at))
    return found


def complete(url: str, model: str) -> None:
    body = {"model": model, "prompt": "One request", "max_tokens": 4, "temperature": 0.7, "seed": 1, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        for _ in response.iter_lines():
            pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.traced", description=__doc__.split("\n\n")[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="local")
    parser.add_argument("--max-files", type=int, help="exit code 1 where there are more files")
    options = parser.parse_args(argv)
    hook = Path(__file__).with_name("hook")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
        environment = {"TRACED_OUT": folder, "TRACED_ROOT": str(ROOT), "PYTHONPATH": path}
        model = "traced"
        arguments = ["--model", str(MODEL), "--served-model-name", model, "--device", "cpu", *LAYOUTS[options.layout]]
        with served(arguments, port=free_port(), env=environment) as server:
            complete(server.url, model)  # what is imported or made at the first request only
            began = time.monotonic()
            complete(server.url, model)
            idle = traced(server, out, 2 * (time.monotonic() - began) + 1, model)
            found = traced(server, out, None, model)
    of_request = sorted(found.keys() - idle.keys(), key=found.__getitem__)
    for file in of_request:
        print(file)
    print(f"{len(of_request)} files, and {len(found.keys() & idle.keys())} that are entered without a request, too")
    return 1 if options.max_files is not None and len(of_request) > options.max_files else 0


if __name__ == "__main__":
    sys.exit(main())
