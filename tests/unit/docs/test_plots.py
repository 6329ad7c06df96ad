"""Pictures of docs/plots are what their figures say, and the style that all pictures share holds."""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.docs import plots
from testkit.kube.scaling_picture import timeline
from testkit.pictures import texts

from bench.pictures import figure, missing, picture
from perf.fabric.barrier import WAYS, idle
from perf.fleet.day_picture import EVERY, day

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@picture
def line(title: str) -> Figure:
    drawn = figure(3, 2, title)
    drawn.subplots().plot([0, 1], [0.123456, 0.5])
    return drawn


def test_committed_pictures_are_what_their_figures_say() -> None:
    """Where this fails: ``python -m testkit.docs.plots`` draws them again, with the matplotlib of constraints.txt."""
    drawn = dict(plots.drawn())
    assert {path.name for path in plots.FOLDER.glob("*.svg")} == drawn.keys() | {"bursty-day.svg"}
    stale = [name for name, text in drawn.items() if (plots.FOLDER / name).read_text(encoding="utf-8") != text]
    assert stale == []


def test_the_same_data_gives_the_same_bytes_whatever_a_user_has_set() -> None:
    import matplotlib

    once = line("some & title")
    with matplotlib.rc_context({"svg.fonttype": "path", "lines.linewidth": 9}):
        assert line("some & title") == once
    assert "some & title" in texts(once)
    assert not re.search(r'="[^"]*\d\.\d{3}', once), "coordinates are short"
    assert "<dc:date>" not in once
    assert "prefers-color-scheme: dark" in once


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == ""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install -e '.[plots]'" in missing()
    with pytest.raises(ModuleNotFoundError, match=r"plots"):
        line("x")


def test_a_scaling_release_is_drawn_target_by_target() -> None:
    found = json.loads((plots.FOLDER / "scaling.json").read_text())
    drawn = inspect.unwrap(timeline)(found, "title")
    latency, tokens, *targets = drawn.axes
    np.testing.assert_array_equal(latency.get_lines()[0].get_xydata(), found["p99_ms"])
    np.testing.assert_array_equal(tokens.get_lines()[0].get_xydata(), found["tokens"])
    assert [axes.get_ylabel() for axes in targets] == ["attention", "experts of\ngroup 0", "experts of\ngroup 1"]
    for axes, target in zip(targets, ("attention", "experts 0", "experts 1"), strict=True):
        for way, count in zip(("wanted", "told", "ready"), axes.get_lines(), strict=False):
            np.testing.assert_array_equal(count.get_xydata(), found["counts"][way][target])
    assert {text.get_text() for text in latency.texts} == found["marks"].keys()


def test_where_prometheus_has_nothing_a_line_breaks() -> None:
    gap = [[0, 5.0], [1, 6.0], [9, 7.0]]
    found = {"seconds": 10, "marks": {"calm": 0}, "p99_ms": gap, "tokens": [], "counts": {"wanted": {}}}
    latency, tokens = inspect.unwrap(timeline)(found, "title").axes
    assert np.isnan(latency.get_lines()[0].get_ydata()).tolist() == [False, False, True, False]
    assert len(tokens.get_lines()[0].get_xydata()) == 0


def test_idle_shares_are_drawn_way_by_way() -> None:
    found = {"even": {way: {"mean": 0.25 * n, "most": 0.3 * n} for n, way in enumerate(WAYS, 1)}}
    (axes,) = inspect.unwrap(idle)(found).axes
    assert [bar.get_width() for bar in axes.patches] == [0.25, 0.5]
    assert [marks.get_offsets()[0][0] for marks in axes.collections] == [0.3, 0.6]
    assert {"even", "25 %", "50 %", *WAYS} <= set(texts(idle(found)))


def test_a_day_shows_the_highest_of_some_minutes() -> None:
    minutes = 2 * EVERY
    counts = {"attention": list(range(minutes)), "experts/0": [1] * minutes, "experts/1": [2] * minutes}
    way = {"gpu_hours": 12.4, "attainment": 0.5, "replicas": counts}
    shards = way | {"ended_and_met": [[10 * (at + 1), 9 * (at + 1)] for at in range(minutes)]}
    ways = {"shard groups": shards, "fixed for the peak": way}
    found = {"requests_per_s": [*range(minutes)], "ways": ways}
    load, attention, seats, missed = inspect.unwrap(day)(found).axes
    assert load.patches[0].get_data().values.tolist() == [EVERY - 1, minutes - 1]
    assert [stairs.get_label() for stairs in attention.patches] == ["scaled", "fixed, as good"]
    assert [stairs.get_label() for stairs in seats.patches] == ["group 0", "group 1", "fixed, as good (most)"]
    assert missed.patches[0].get_data().values == pytest.approx([10, 10])
    said = "shard groups: 12 GPU-hours, 50.00% of requests within both targets"
    assert {said, "requests/s", "hour of the day", "group 1"} <= set(texts(day(found)))
