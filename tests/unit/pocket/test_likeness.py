"""How alike domains choose their experts: the distance, and the groups made of it."""

from __future__ import annotations

import numpy as np
import pytest

from pocket_moe.measure.likeness import between, distances, groups


def test_a_distance_is_the_share_of_choices_that_would_move() -> None:
    """Of three domains in two layers: half of the choices differ in one layer alone, and everything in both."""
    share_DLE = np.array([[[2.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[0.0, 2.0], [2.0, 0.0]]])
    apart = distances(share_DLE)
    assert apart.tolist() == [[0.0, 0.25, 0.75], [0.25, 0.0, 0.5], [0.75, 0.5, 0.0]]
    assert distances(share_DLE * 7) == pytest.approx(apart), "counts or shares"


def test_groups_join_the_most_alike_first() -> None:
    at = np.array([0.0, 5.0, 0.1, 5.1, 5.2, 9.0])
    apart = np.abs(at[:, None] - at) / 10
    assert groups(apart, 0.1) == [[1, 3, 4], [0, 2], [5]]
    assert groups(apart, 1.0) == [[0, 1, 2, 3, 4, 5]]
    assert groups(apart, 0.0) == [[0], [1], [2], [3], [4], [5]]
    assert between(apart, [0, 2], [0, 2]) == pytest.approx(0.01), "no domain is compared with itself"
    assert between(apart, [5], [5]) == 0
