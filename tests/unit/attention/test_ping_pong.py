"""Two micro-batches of a step: the same tokens, and the order of events that hides the exchange."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from testkit.fabric.recording_link import RecordingLink
from testkit.fabric.tcp import hello, linked, seat_of, serve, table_of
from testkit.models.engines import MakeEngine, ask, run, tokens
from torch import Tensor

from services.attention.step.overlap import OverlapPolicy
from services.errors import ExpertUnavailable
from services.model.experts import ExpertShard
from services.routing import even_groups

LAYERS = 3
DEADLINE_S = 20.0


def on() -> OverlapPolicy:
    return OverlapPolicy("on", tokens_per_row=32.0)


@pytest.fixture(scope="module")
def wanted(tiny: Any) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts, some with a common beginning, and the oracle's answers."""
    draw, shared = random.Random(6), [5, 9, 33, 7, 21, 60, 44]
    prompts = [shared + [draw.randrange(1, 94) for _ in range(length)] for length in (1, 4, 30, 17)]
    prompts += [[draw.randrange(1, 94) for _ in range(length)] for length in (2, 9, 45, 1)]
    return {f"r{number}": (prompt, tiny.greedy(prompt, 12)) for number, prompt in enumerate(prompts)}


def test_greedy_equals_the_oracle_in_ping_pong(
    make_engine: MakeEngine, tiny: Any, wanted: dict[str, tuple[list[int], list[int]]]
) -> None:
    """Also when blocks run out, prompts are cut, and prefixes are found again."""
    link = RecordingLink(tiny.link())
    engine = make_engine(link=link, overlap=on(), kv_blocks=18, max_num_seqs=6, max_num_batched_tokens=16)
    events = run(engine, *(ask(name, prompt, 12) for name, (prompt, _) in wanted.items()))
    assert {name: tokens(of_one) for name, of_one in events.items()} == {n: answer for n, (_, answer) in wanted.items()}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert 0 < stats.overlapped_steps <= stats.steps
    assert link.max_in_flight == 2
    assert link.in_flight == 0


def test_attention_of_one_half_comes_before_the_wait_for_the_other(make_engine: MakeEngine, tiny: Any) -> None:
    link = RecordingLink(tiny.link())
    engine = make_engine(link=link, overlap=on())
    for number, length in enumerate((3, 2)):
        engine.add(ask(f"r{number}", list(range(1, 1 + length)), max_tokens=1))
    engine.step()
    order = [("dispatch", 0, 3), ("dispatch", 0, 2)]
    for layer in range(1, LAYERS):
        for rows in (3, 2):
            order += [("combine", layer - 1, rows), ("dispatch", layer, rows)]
    assert link.calls == [*order, ("combine", LAYERS - 1, 3), ("combine", LAYERS - 1, 2)]


@pytest.mark.parametrize("failing", [1, 2, 3, 6])
def test_every_handle_is_combined_though_one_fails(make_engine: MakeEngine, tiny: Any, failing: int) -> None:
    link = RecordingLink(tiny.link(), fail=(failing, ExpertUnavailable("Nobody is there.")))
    engine = make_engine(link=link, overlap=on())
    for name in ("a", "b"):
        engine.add(ask(name, [1, 2, 3], max_tokens=2))
    events = engine.step()
    assert [event.error.code for event in events if event.error] == ["expert_unavailable"] * 2
    assert link.in_flight == 0
    assert sum(what == "dispatch" for what, *_ in link.calls) == sum(what == "combine" for what, *_ in link.calls)
    assert len(tokens(run(engine, ask("c", [1, 2, 3], max_tokens=2))["c"])) == 2


@dataclass
class WaitingExperts:
    """Experts that answer the first half of a layer only when the other half's rows have arrived too."""

    shard: ExpertShard
    top_k: int
    rows: int
    rows_in_flight: Callable[[], int] = lambda: 0
    done: dict[int, int] = field(default_factory=dict)
    largest: int = 0
    late: threading.Event = field(default_factory=threading.Event)

    def compute(self, layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        rows, before = len(x_TD) // self.top_k, self.done.get(layer, 0)
        self.largest = max(self.largest, rows)
        until = time.monotonic() + DEADLINE_S
        while before + self.rows_in_flight() < self.rows and not self.late.is_set():
            if time.monotonic() > until:
                self.late.set()
            time.sleep(0.001)
        self.done[layer] = before + rows
        return self.shard.forward(layer, x_TD, ids_TK, weights_TK)


def test_over_tcp_both_halves_are_with_the_experts_at_once(make_engine: MakeEngine, tiny: Any) -> None:
    """Proven by order: no half is answered before the other's attention was computed and its rows sent."""
    spec = tiny.parts.model.spec
    experts = WaitingExperts(tiny.parts.shard, top_k=spec.top_k, rows=5)
    groups = even_groups(list(spec.moe_layers), spec.num_experts, 1)
    server = serve(
        experts.compute,
        experts=groups[0].experts,
        hidden=spec.hidden_size,
        secret=b"one secret for all workers",
        hello=hello(spec.hidden_size, seat=0),
        join_rows=1,
    )
    experts.rows_in_flight = lambda: server.rows_in_flight
    table = table_of(seat_of(server, 0), groups=groups, experts=spec.num_experts)
    try:
        with linked(table, hidden=spec.hidden_size, call_s=2 * DEADLINE_S) as link:
            engine = make_engine(link=link, overlap=on())
            prompts = {"a": [1, 2, 3], "b": [4, 5]}
            events = run(engine, *(ask(name, prompt, max_tokens=1) for name, prompt in prompts.items()))
            in_time = not experts.late.is_set()
    finally:
        experts.late.set()
        server.close()
    assert all(tokens(events[name]) == tiny.greedy(prompt, 1) for name, prompt in prompts.items())
    assert experts.largest == 3, "the step was split"
    assert in_time, "the other half's rows did not come before this one's answer"
