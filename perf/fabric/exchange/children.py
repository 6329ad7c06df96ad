"""Processes of a measurement: JSON lines in and out, a log each, and none that outlives its deadline."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class ChildFailed(RuntimeError):
    """A process ended, or said nothing, where an answer was due."""


class Child:
    """A running worker. ``facts`` go in as its first line."""

    def __init__(self, name: str, module: str, facts: Mapping[str, Any], logs: Path, deadline_s: float) -> None:
        self.name = name
        self.gpu: int = facts["gpu"]
        self._log = (logs / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", f"perf.fabric.exchange.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"} | os.environ,
        )
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.send(name=name, deadline_s=deadline_s, **facts)

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildFailed(f"{self.name} takes no commands: {error}") from error

    def answer(self, seconds: float = 60.0) -> dict[str, Any]:
        line = self.any_answer(seconds)
        if "error" in line:
            raise ChildFailed(f"{self.name}: {line['error']}")
        return line

    def any_answer(self, seconds: float = 60.0) -> dict[str, Any]:
        """The next answer, which may be an error."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise ChildFailed(f"{self.name} said nothing for {seconds:g} s") from None
        if line is None:
            raise ChildFailed(f"{self.name} ended with {self._process.wait()}: {self.tail()}")
        return line

    def answered(self) -> bool:
        """Whether :meth:`answer` returns, or fails, at once."""
        return not self._lines.empty()

    def ask(self, seconds: float = 60.0, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self.answer(seconds)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """Exit code; raises subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    def tail(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()[-1500:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)


class Children:
    """Starts processes and ends them all, at the latest when the time is up: then this one ends too."""

    def __init__(self, logs: Path, deadline_s: float, at_last: Callable[[], None]) -> None:
        self._logs, self._until, self._at_last = logs, time.monotonic() + deadline_s, at_last
        self._children: list[Child] = []
        self._timer = threading.Timer(deadline_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def start(self, name: str, module: str, **facts: Any) -> Child:
        child = Child(name, module, facts, self._logs, self.left_s)
        self._children.append(child)
        return child

    def end_all(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait(20)
        self._children.clear()

    def _give_up(self) -> None:
        print("TIME IS UP: ending all processes", flush=True)
        for child in self._children:
            child.kill()
        self._at_last()
        os._exit(3)


class Parent:
    """The other end, in a worker."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = json.loads(sys.stdin.readline())
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print belongs to the log
        timer = threading.Timer(self.facts["deadline_s"], os._exit, args=(9,))
        timer.daemon = True
        timer.start()
        self._lock = threading.Lock()

    def report(self, **answer: Any) -> None:
        with self._lock:
            self._out.write(json.dumps(answer) + "\n")
            self._out.flush()

    def commands(self) -> Any:
        """Commands, until the parent closes the pipe."""
        for line in sys.stdin:
            yield json.loads(line)
