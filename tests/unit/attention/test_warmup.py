"""An engine that warms up: dummy requests leave nothing behind, also where experts fail meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from services.attention.sequences.plan import BatchLimits
from services.attention.step.engine import Engine
from services.attention.step.warmup import dummy_batches
from services.errors import ExpertUnavailable, InternalError
from services.fabric.link import SynchronousLink
from services.fabric.local import LocalHandle
from services.messages import GenerateRequest, SamplingParams, TokenEvent


class Counted(SynchronousLink):
    """A link that counts exchanges, and fails from ``fails_at`` on, until that is changed."""

    def __init__(self, link: Any, fails_at: int | None = None) -> None:
        self.link, self.fails_at, self.exchanges = link, fails_at, 0

    def dispatch(self, *what: Any) -> Any:
        self.exchanges += 1
        if self.fails_at is not None and self.exchanges >= self.fails_at:
            raise ExpertUnavailable("Nobody has these experts.", hint="", retry_after_s=1.0)
        return self.link.dispatch(*what)

    def combine(self, handle: Any) -> Any:
        return self.link.combine(handle)


def _answer(engine: Engine[Any], tokens: list[int]) -> list[int]:
    engine.add(
        GenerateRequest(
            id="asked", attempt=1, token_ids=tokens, prompt_len=len(tokens), deadline_ms=1 << 52, priority=0, tenant="",
            sampling=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True), reply_to="",
        )
    )  # fmt: skip
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    return [event.token_id for event in events if event.token_id is not None]


def test_nothing_of_it_is_left(
    make_engine: Callable[..., Engine[LocalHandle]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fresh, engine = make_engine(), make_engine()
    before = engine.stats()
    engine.warm_up()
    assert engine.stats() == before
    assert not engine.held()
    assert "warmed up in" in caplog.text
    dummy = next(dummy_batches(engine._limits, 4096))[0].token_ids[:20]
    assert _answer(engine, dummy) == _answer(fresh, dummy)
    assert engine.stats().prefix_hit_tokens == fresh.stats().prefix_hit_tokens == 0


@pytest.mark.parametrize(("most", "tokens"), [(6, 64), (96, 64), (64, 32)])
def test_every_size_of_batch_is_met(
    make_engine: Callable[..., Engine[LocalHandle]], tiny: Any, most: int, tokens: int
) -> None:
    sizes: set[int] = set()

    class Sized(Counted):
        def dispatch(self, layer: int, x_TD: Any, *rest: Any) -> Any:
            sizes.add(len(x_TD))
            return super().dispatch(layer, x_TD, *rest)

    link = Sized(tiny.link())
    make_engine(link=link, max_num_seqs=most, max_num_batched_tokens=tokens, kv_blocks=512).warm_up()
    wanted = [1 << power for power in range(10) if 1 << power <= min(most, tokens)]
    assert {*wanted, min(most, tokens)} <= sizes, "decode steps"
    assert max(sizes) == tokens, "a step of as many tokens as may be"


def test_a_worker_that_is_to_end_warms_up_no_further(
    make_engine: Callable[..., Engine[LocalHandle]], tiny: Any
) -> None:
    class Begun(Counted):
        begun = 0

        def begin_step(self, step: int, rows: Any) -> None:
            super().begin_step(step, rows)
            self.begun += 1

        def finish_step(self) -> bool:
            self.begun -= 1
            return super().finish_step()

    link = Begun(tiny.link())
    engine = make_engine(link=link)
    engine.warm_up(lambda: link.exchanges > 20)
    assert not engine.has_work
    assert link.exchanges < 60
    assert link.begun == 0, "the exchanges of a step launched ahead are finished, too"


def test_a_step_that_should_not_fail_ends_the_worker(
    make_engine: Callable[..., Engine[LocalHandle]], tiny: Any
) -> None:
    class Broken(Counted):
        def combine(self, _handle: Any) -> Any:
            raise RuntimeError("an illegal address")

    with pytest.raises(InternalError):
        make_engine(link=Broken(tiny.link())).warm_up()


def test_without_room_for_a_request_there_is_nothing_to_warm_up_with() -> None:
    tiny_limits = BatchLimits(
        max_num_seqs=4, max_num_batched_tokens=8, max_model_len=3, vocab_size=10, eos_token_ids=()
    )
    assert not list(dummy_batches(tiny_limits, 4096))


def test_where_experts_go_meanwhile_it_serves_once_they_are_back(
    make_engine: Callable[..., Engine[LocalHandle]], tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    link = Counted(tiny.link(), fails_at=40)
    engine = make_engine(link=link)
    engine.warm_up()
    assert "warm-up is incomplete: Nobody has these experts." in caplog.text
    assert not engine.has_work
    link.fails_at = None
    assert _answer(engine, [5, 9, 2]) == _answer(make_engine(), [5, 9, 2])
