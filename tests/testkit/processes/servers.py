"""Servers run as a user runs them: real processes, real sockets, a real Redis."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import redis

from services.queue.embedded import find_redis_server
from services.runtime import die_with_parent
from testkit.waiting import until

START_TIMEOUT_S = 120
_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to whoever asks for any: none is taken between being found and being used."""
_turns = itertools.count(os.getpid() * 997)  # processes that test side by side begin far apart


def free_port() -> int:
    """A TCP port on loopback that nothing has now, another one each time."""
    for _ in _PORTS:
        port = _PORTS[next(_turns) % len(_PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nothing has now; none of them is given again."""
    for _ in _PORTS:
        turns = [next(_turns) for _ in range(count)]
        first = _PORTS[turns[0] % len(_PORTS)]
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("there are not so many free ports in a row")


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def flags(**options: object) -> list[str]:
    """Command-line flags: ``max_num_seqs=4, prefix_cache=False`` -> --max-num-seqs 4 --no-prefix-cache."""
    args: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{option}" if value else f"--no-{option}")
        else:
            args += [f"--{option}", str(value)]
    return args


@dataclass(kw_only=True)
class Proc:
    """One process with its output in a file; killed at the end of the test, whatever happens."""

    name: str
    popen: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log(self) -> str:
        return self.log_path.read_text("utf-8", errors="replace")

    def kill9(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM and wait; the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill9()
            raise AssertionError(f"{self.name} ignored SIGTERM for {timeout_s} s:\n{self.log()[-3000:]}") from None


@dataclass(kw_only=True)
class Bench:
    """A test's processes and folder. Use through the ``bench`` context manager."""

    folder: Path
    procs: list[Proc] = field(default_factory=list)

    def start(self, name: str, args: Sequence[str]) -> Proc:
        """Run ``args`` in the background with a clean EXPERTMESH_ environment. The kernel ends it with this process,
        if started from the main thread: of another one it would not outlive the thread."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("EXPERTMESH_")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        log_path = self.folder / f"{name}-{len(self.procs)}.log"
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                list(args),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self.folder,
                preexec_fn=die_with_parent() if in_main_thread() else None,
            )
        proc = Proc(name=name, popen=popen, log_path=log_path)
        self.procs.append(proc)
        return proc

    def role(self, role: str, *args: str, **options: object) -> Proc:
        return self.start(role, [sys.executable, "-m", f"services.{role}", *args, *flags(**options)])

    def serve(self, model: Path, **options: object) -> Server:
        """``expertmesh serve`` until /ready."""
        port = free_port()
        command = [sys.executable, "-m", "services", "serve", *flags(model=model, port=port, **options)]
        server = Server(url=f"http://127.0.0.1:{port}", proc=self.start("serve", command))
        server.wait_ready()
        return server

    def redis(
        self,
        *options: str,
        port: int,
        address: str = "127.0.0.1",
        data: str = "redis-data",
        append_only: bool = True,
        within: Callable[[Sequence[str]], list[str]] = list,
    ) -> Proc:
        """A redis-server that keeps its data in a folder of this one; its command is what ``within`` makes of it."""
        folder = self.folder / data
        folder.mkdir(exist_ok=True)
        args = ["--port", str(port), "--bind", address, "--dir", str(folder), "--save", "", *options]
        args += ["--appendonly", "yes" if append_only else "no"]
        proc = self.start("redis", within([str(find_redis_server()), *args]))

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError), redis.Redis(address, port, socket_timeout=2) as client:
                return bool(client.ping())
            return False

        until(answers, "redis-server answers")
        return proc

    def close(self) -> None:
        """All end. Workers leave with the help of a scheduler and of Redis, which therefore end last."""
        for _, procs in itertools.groupby(sorted(self.procs, key=_turn), _turn):
            _end(list(procs))


def _turn(proc: Proc) -> int:
    return {"scheduler": 1, "redis": 2}.get(proc.name.partition("-")[0], 0)


def _end(procs: Sequence[Proc]) -> None:
    running = [proc for proc in reversed(procs) if proc.popen.poll() is None]
    for proc in running:
        proc.popen.terminate()
    for proc in running:
        try:
            proc.popen.wait(20)
        except subprocess.TimeoutExpired:
            proc.kill9()


@contextlib.contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    """Processes that end with the block; their logs are printed when it fails."""
    running = Bench(folder=folder)
    try:
        yield running
    except BaseException:
        for proc in running.procs:
            print(f"--- {proc.name} (pid {proc.pid})\n{proc.log()[-4000:]}")
        raise
    finally:
        running.close()


def is_ready(url: str, timeout_s: float = 2) -> bool:
    """Whether /ready answers 200."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=timeout_s).status_code == 200
    return False


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@dataclass(kw_only=True)
class Server:
    """A gateway that listens on ``url``."""

    url: str
    proc: Proc

    @property
    def page(self) -> str:
        """Where it is seen whether it is ready, and what its metrics are."""
        return self.url

    def ready(self) -> bool:
        assert self.proc.popen.poll() is None, f"the server ended early:\n{self.proc.log()[-4000:]}"
        return is_ready(self.page)

    def wait_ready(self) -> None:
        until(self.ready, "/ready answers 200", limit_s=START_TIMEOUT_S, every_s=0.1)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series called ``name`` that carry ``labels``."""
        return metric_sum(httpx.get(f"{self.page}/metrics", timeout=10).text, name, **labels)

    def of_role(self, role: str) -> list[psutil.Process]:
        """Its processes of that role that run, oldest first."""
        found = []
        for child in psutil.Process(self.proc.pid).children():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if ["expertmesh", role] == child.cmdline()[3:5]:
                    found.append((child.create_time(), child))
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def metric_sum(text: str, name: str, **labels: str) -> float:
    """Sum of the samples of ``name`` in a Prometheus exposition that carry all ``labels``."""
    total = 0.0
    for line in text.splitlines():
        match = re.match(rf"{re.escape(name)}(\{{(.*)\}})? (\S+)$", line)
        if match and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
            total += float(match[3])
    return total
