"""Prompts beside streams: as many rows as keep a step within a multiple of one without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testkit.gpu.decode_bench import request

from services.attention.batching.pace import DEARER, LEARNT_FROM, MARGIN, MIN_ROWS, SAMPLES, Pace
from services.attention.step.engine import Engine

MakeEngine = Callable[..., Engine[Any]]


def learnt(*, alone_s: float = 0.010, row_s: float = 1e-5, decodes: int = 64) -> Pace:
    pace = Pace(2.0 / MARGIN)
    for _ in range(20):
        pace.note(decodes, 0, alone_s)
        pace.note(decodes, 1000, alone_s + 1000 * row_s)
    return pace


def test_a_step_takes_at_most_the_multiple() -> None:
    assert learnt().rows(64) == 1000
    assert learnt(row_s=4e-5).rows(64) == MIN_ROWS, "with less, prompts would take too long"
    assert learnt(alone_s=0.040).rows(64) == 4000


def test_more_decodes_leave_more_room_than_were_seen_of_fewer() -> None:
    pace = learnt()
    for _ in range(20):
        pace.note(256, 0, 0.030)
    assert pace.rows(300) == 3000
    assert pace.rows(100) == 1000, "as of the 64 that were seen"
    assert pace.rows(8) is None, "nothing is known of so few"


def test_without_experience_or_streams_there_is_no_bound() -> None:
    pace = Pace(2.0 / MARGIN)
    assert pace.rows(64) is None
    pace.note(64, 0, 0.010)
    assert pace.rows(64) is None, "what a row of a prompt takes is not known"
    pace.note(64, LEARNT_FROM - 1, 0.5)
    assert pace.rows(64) is None, "of so few nothing is learnt"
    pace.note(0, 2000, 0.010)
    assert pace.rows(64) == 2000 / DEARER
    assert pace.rows(0) is None


def test_steps_of_prompts_alone_count_only_until_there_are_others() -> None:
    pace = Pace(2.0 / MARGIN)
    pace.note(64, 0, 0.010)
    pace.note(0, 8000, 0.040)
    assert pace.rows(64) == 2000 / DEARER
    pace.note(64, 2000, 0.030)
    pace.note(0, 8000, 0.040)
    assert pace.rows(64) == 1000


def test_after_the_warm_up_prompts_are_learnt_anew() -> None:
    pace = Pace(2.0 / MARGIN)
    for seconds in (2.0, 1.5, 0.010, 0.010):
        pace.note(64, 0, seconds)
    pace.note(0, 8000, 3.0)
    pace.warmed_up()
    assert pace.rows(64) is None
    pace.note(0, 8000, 0.040)
    assert pace.rows(64) == 2000 / DEARER, "the slow decodes were those that loaded kernels"


def test_slow_moments_are_forgotten() -> None:
    pace = learnt()
    for _ in range(3):
        pace.note(64, 0, 1.0)
    assert pace.rows(64) == 1000, "the median of decode steps is what it was"
    pace.note(64, 1000, 1.0)
    assert pace.rows(64) == 1000, "one slow step of prompts is no rule"
    pace.note(64, 1000, 1.0)
    assert pace.rows(64) == MIN_ROWS
    for _ in range(SAMPLES):
        pace.note(64, 300, 0.010 + 300 * 1e-5)
    assert pace.rows(64) == 1000


def test_two_steps_show_what_became_dearer() -> None:
    pace = learnt()
    for _ in range(2):
        pace.note(64, 1000, 0.010 + 1000 * 1.25e-5)
    assert pace.rows(64) == 800


@pytest.mark.parametrize("lookahead", ["off", "all"])
def test_a_long_prompt_comes_in_pieces_of_that_size_beside_a_stream(make_engine: MakeEngine, lookahead: Any) -> None:
    engine = make_engine(
        prefill_stretch=2.0, max_num_batched_tokens=2000, max_model_len=2000, kv_blocks=700, lookahead=lookahead
    )
    pace = engine._pace
    assert pace is not None
    pace.rows = lambda decodes: 300 if decodes else None  # type: ignore[method-assign]
    engine.add(request("stream", [5, 9, 11], 30))
    engine.step()
    engine.add(request("long", [7] * 1000, 1))
    pieces = list[int]()
    before = engine.stats()
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        pieces += [] if stats.steps == before.steps else [stats.prefill_tokens - before.prefill_tokens]
        before = stats
    assert [rows for rows in pieces if rows] == [300, 300, 300, 100]
    assert pace._decodes, "it learns from steps"
    assert pace._beside.seen
