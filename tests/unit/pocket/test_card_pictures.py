"""The card's pictures: what they draw is what the records say."""

from __future__ import annotations

import inspect
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.path import Path as MplPath
from testkit.pictures import texts
from testkit.pocket.card import DOMAINS, skewed
from testkit.pocket.evidence import script

from bench.pictures import BLUE, ORANGE
from pocket_moe.card.plots_heat import domain_order, expert_order, heat_map, loads
from pocket_moe.card.plots_lines import loss_curves, peaks
from pocket_moe.measure.traffic import load_record


def test_pictures_name_what_they_show(root: Path) -> None:
    assert script("card").main(["--root", str(root)]) == 0
    shown = {name: texts((root / f"plots/{name}.svg").read_text("utf-8")) for name in ("loss", "experts", "load")}
    assert {"MoE, held-out split", "dense, training", "millions of training tokens"} <= set(shown["loss"])
    assert {*DOMAINS, "layer 0", "layer 1", "4x"} <= set(shown["experts"])
    assert {*DOMAINS, "all together"} <= set(shown["load"])


def test_a_card_without_matplotlib_says_what_to_install(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert script("card").main(["--root", str(root)]) == 1
    assert "pip install -e '.[plots]'" in capsys.readouterr().err


def test_no_held_out_loss_is_cut_off() -> None:
    """All losses are drawn as they are, and the held-out ones are inside the plot; the first training loss is not."""
    training, heldout = [(0.1, 9.0), (2.0, 2.5)], [(0.5, 4.0), (1.0, 3.5), (2.0, 3.0)]
    (axes,) = inspect.unwrap(loss_curves)({"MoE": training}, {"MoE": heldout}).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"MoE, training": [*map(list, training)], "MoE, held-out split": [*map(list, heldout)]}
    bottom, top = axes.get_ylim()
    assert bottom < 2.5
    assert 4.0 < top < 9.0
    assert axes.get_xlim()[0] == 0
    assert ET.fromstring(loss_curves({"MoE": [(1.0, 9.0), (2.0, 5.0)]}, {"MoE": []})) is not None


def test_a_number_stands_by_what_it_is_of() -> None:
    load = {"domains": ["a", "b"], "peak": {"a": [1.0, 3.0], "b": [3.0, 3.5]}, "peak_of_all": [1.0, 1.0]}
    (axes,) = inspect.unwrap(peaks)(load).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a", "all together"]
    assert [bar.get_width() for bar in axes.patches] == [3.25, 2.0, 1.0]
    assert axes.collections[0].get_offsets().tolist() == [[3.5, 0], [3.0, 1], [1.0, 2]]
    said = {(text.get_text(), *np.round(text.xy, 6).tolist()) for text in axes.texts}
    assert said == {
        *{("3.25", 3.25, 0.0), ("2.00", 2.0, 1.0), ("1.00", 1.0, 2.0)},
        *{("3.50", 3.5, 0.0), ("3.00", 3.0, 1.0)},
    }


def test_experts_stand_by_the_domain_they_serve() -> None:
    share_DLE = loads(load_record(skewed()))
    assert share_DLE.mean(2) == pytest.approx(np.ones((3, 2)))
    order = expert_order(share_DLE[:, 0])
    assert set(order[:4]) == {0, 1, 2, 3}
    assert sorted(order) == list(range(16))
    assert [int(share_DLE[:, 0, e].argmax()) for e in order] == sorted(int(share_DLE[:, 0, e].argmax()) for e in order)


def test_neighbouring_rows_look_alike() -> None:
    one, other = np.array([2.0, 0.5, 1.0, 1.0]), np.array([0.5, 2.0, 1.0, 1.0])
    assert domain_order(np.stack([one, other, one * 1.01])[:, None]) == [0, 2, 1]


def test_a_cell_is_where_its_domain_and_expert_meet() -> None:
    """a uses expert 3 alone, b expert 1 alone; nobody uses 0 and 2, which stand behind 3."""
    load = {"domains": ["a", "b"], "counts": {"a": [[0, 0, 0, 4]], "b": [[0, 4, 0, 0]]}}
    (axes,) = inspect.unwrap(heat_map)(load).axes
    cells = {patch.get_facecolor(): corners(patch.get_path()) for patch in axes.patches}
    assert cells == {
        to_rgba(ORANGE, 1.0): {(0, 0), (3, 1)},
        to_rgba(BLUE, 0.6): {(1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1)},
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def corners(path: MplPath) -> set[tuple[int, int]]:
    """Columns and rows of the cells in a path of rectangles, of five points each."""
    return {(int(x), int(y)) for x, y in path.vertices.reshape(-1, 5, 2)[:, 0]}


def test_an_expert_nobody_uses_can_be_drawn() -> None:
    load = {"domains": ["a", "b"], "counts": {"a": [[4, 0, 0, 0]], "b": [[0, 0, 0, 0]]}}
    assert "nan" not in heat_map(load)
    assert "nan" not in peaks(load | {"peak": {"a": [4.0], "b": [0.0]}, "peak_of_all": [4.0]})
