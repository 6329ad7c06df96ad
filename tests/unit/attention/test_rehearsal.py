"""An engine that rehearses: made-up requests leave nothing behind, also where experts fail meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from services.attention.engine import Engine
from services.errors import ExpertUnavailable
from services.fabric.experts import Certain
from services.fabric.local import LocalHandle
from services.messages import GenerateRequest, SamplingParams, TokenEvent


class Counted(Certain):
    """A link that counts exchanges, and fails from ``fails_at`` on until told otherwise."""

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
    engine.rehearse()
    assert engine.stats() == before
    assert not engine.held()
    assert "rehearsed after" in caplog.text
    assert _answer(engine, [5, 9, 2, 7, 1]) == _answer(fresh, [5, 9, 2, 7, 1])
    assert engine.stats().prefix_hit_tokens == fresh.stats().prefix_hit_tokens == 0


def test_every_size_of_batch_is_met(make_engine: Callable[..., Engine[LocalHandle]], tiny: Any) -> None:
    sizes: set[int] = set()

    class Sized(Counted):
        def dispatch(self, layer: int, x_TD: Any, *rest: Any) -> Any:
            sizes.add(len(x_TD))
            return super().dispatch(layer, x_TD, *rest)

    make_engine(link=Sized(tiny.link()), max_num_seqs=6).rehearse()
    assert {1, 2, 4, 6} <= sizes, "decode steps"
    assert max(sizes) == 64, "a step of as many tokens as may be"


def test_where_experts_go_meanwhile_it_serves_once_they_are_back(
    make_engine: Callable[..., Engine[LocalHandle]], tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    link = Counted(tiny.link(), fails_at=40)
    engine = make_engine(link=link)
    engine.rehearse()
    assert "rehearsed in part only: Nobody has these experts." in caplog.text
    assert not engine.has_work
    link.fails_at = None
    assert _answer(engine, [5, 9, 2]) == _answer(make_engine(), [5, 9, 2])
