"""Decodes by graph with disaggregated experts over shared memory while expert workers die and join; see
decode_graphs.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from perf.fabric.exchange.children import Child, Children

ROWS = 64


class Disaggregated:
    """An attention worker on the first GPU, replicas of all experts on the others."""

    def __init__(self, out: Path, gpus: int, limit_s: float) -> None:
        self._children = Children(out, limit_s, at_last=lambda: None)
        self._gpus = gpus
        self._epoch = 0
        self._started = 0

    def run(self) -> dict[str, Any]:
        """Two replicas; the one in use is killed, a third joins, the other one is killed too. No graph may be made
        again and no token may change."""
        try:
            return self._run()
        finally:
            self._children.end_all()

    def _run(self) -> dict[str, Any]:
        starting = [self._start_seat() for _ in range(2)]
        gpu = 0 if self._gpus else -1
        deadline_ms = 20 if self._gpus else 5000
        attention = self._children.start(
            "attention", "pocket_attention", gpu=gpu, rows=ROWS, deadline_ms=deadline_ms
        )  # fmt: skip
        seats = [child.answer(120) | {"child": child} for child in starting]
        attention.answer(120)
        self._publish(attention, seats)
        attached = attention.ask(200, do="attach", seats=2)
        print("   disaggregated", attached, flush=True)
        warm = attention.ask(120, do="run", for_s=2.0)
        print("   disaggregated warm:", warm, flush=True)
        attention.send(do="run", for_s=60.0)
        time.sleep(1.5)
        self._kill(attention, seats, "kill of one of two")
        third = self._start_seat()
        joined = third.answer(90) | {"child": third}
        self._mark(attention, "join of a third")
        seats.append(joined)
        self._publish(attention, seats)
        self._until_shared(attention, 2)
        time.sleep(2.0)
        self._kill(attention, seats, "kill of the other", first=True)
        time.sleep(1.5)
        attention.send(do="stop")
        return attention.answer(60) | attached

    def _kill(self, attention: Child, seats: list[dict[str, Any]], text: str, first: bool = False) -> None:
        """The seat in use, or the oldest; the table follows later, as a lease would end later."""
        victim = seats[0] if first else self._used(attention, seats)
        self._mark(attention, text)
        victim["child"].kill()
        time.sleep(0.4)
        seats.remove(victim)
        self._publish(attention, seats)

    def _used(self, attention: Child, seats: list[dict[str, Any]], seconds: float = 10.0) -> dict[str, Any]:
        """The seat of a step that only decodes: steps with long prompts use none."""
        until = time.time() + seconds
        while not (found := [seat for seat in seats if seat["seat"] in attention.ask(do="shared")["used"]]):
            assert time.time() < until, "no step uses shared memory"
        return found[0]

    def _start_seat(self) -> Child:
        number, self._started = self._started, self._started + 1
        gpu = 1 + number % max(1, self._gpus - 1) if self._gpus else -1
        return self._children.start(f"seat-{number}", "pocket_seat", gpu=gpu, seat=number, rows=ROWS)

    def _publish(self, attention: Child, seats: list[dict[str, Any]]) -> None:
        self._epoch += 1
        shown = [{name: seat[name] for name in ("seat", "group", "port")} for seat in seats]
        attention.send(do="table", epoch=self._epoch, seats=shown)

    def _until_shared(self, attention: Child, count: int, seconds: float = 30.0) -> None:
        until = time.time() + seconds
        while time.time() < until and len(attention.ask(do="shared")["usable"]) < count:
            time.sleep(0.05)

    def _mark(self, attention: Child, text: str) -> None:
        attention.send(do="mark", text=text)
