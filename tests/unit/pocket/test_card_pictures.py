"""The card's pictures: what they draw is what the records say."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from testkit.pocket.card import skewed
from testkit.pocket.evidence import script

from pocket_moe.card.plots import steps
from pocket_moe.card.plots_heat import domain_order, expert_order, heat_map, loads
from pocket_moe.card.plots_lines import loss_curves, peaks
from pocket_moe.measure.traffic import load_record

SVG = "{http://www.w3.org/2000/svg}"


def test_pictures_are_well_formed_and_follow_the_page(root: Path) -> None:
    assert script("card").main(["--root", str(root)]) == 0
    for name in ("loss", "experts", "load"):
        svg = (root / f"plots/{name}.svg").read_text()
        ET.fromstring(svg)
        assert "prefers-color-scheme: dark" in svg
    assert (root / "plots/experts.svg").read_text().count("v12h-12z") == 3 * 2 * 16 + 5


def test_no_held_out_loss_is_cut_off() -> None:
    """Coordinates of a strong line map its losses straight, all inside the window; the faint one leaves it."""
    heldout = [(0.5, 4.0), (1.0, 3.5), (2.0, 3.0)]
    svg = ET.fromstring(loss_curves({"MoE": [(0.1, 9.0), (2.0, 2.5)]}, {"MoE": heldout}))
    faint, strong = (
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in svg.iter(f"{SVG}polyline")
    )
    window = svg.find(f"{SVG}clipPath/{SVG}rect")
    assert window is not None
    top = float(window.attrib["y"])
    ys = [y for _, y in strong]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.2)
    assert min(ys) > top + 5
    assert faint[0][1] < top
    assert next(svg.iter(f"{SVG}polyline")).attrib["clip-path"] == "url(#plot)"
    ET.fromstring(loss_curves({"MoE": [(1.0, 9.0), (2.0, 5.0)]}, {"MoE": []}))


def test_a_number_stands_by_what_it_is_of() -> None:
    svg = ET.fromstring(peaks({"domains": ["a"], "peak": {"a": [1.0, 3.0]}, "peak_of_all": [1.0, 1.0]}))
    place = {text.text: float(text.attrib["x"]) for text in svg.iter(f"{SVG}text")}
    bar, mark = list(svg.iter(f"{SVG}rect"))[:2]
    assert place["2.00"] == pytest.approx(float(bar.attrib["x"]) + float(bar.attrib["width"]) - 4, abs=0.2)
    assert place["3.00"] == pytest.approx(float(mark.attrib["x"]) + 6, abs=0.2)


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
    svg = heat_map({"domains": ["a", "b"], "counts": {"a": [[0, 0, 0, 4]], "b": [[0, 4, 0, 0]]}})
    strongest = next(line for line in svg.splitlines() if "area a" in line and "1.00" in line)
    assert 'd="M96 64h12v12h-12zM135 77h12v12h-12z"' in strongest


def test_an_expert_nobody_uses_can_be_drawn() -> None:
    load = {"domains": ["a", "b"], "counts": {"a": [[4, 0, 0, 0]], "b": [[0, 0, 0, 0]]}}
    assert "nan" not in heat_map(load)
    assert "nan" not in peaks(load | {"peak": {"a": [4.0], "b": [0.0]}, "peak_of_all": [4.0]})


def test_round_numbers() -> None:
    assert steps(0, 9, 5) == [0, 2, 4, 6, 8]
    assert steps(2.9, 4.1, 6) == pytest.approx([3.0, 3.2, 3.4, 3.6, 3.8, 4.0])
    assert steps(0, 950, 6) == [0, 200, 400, 600, 800]
