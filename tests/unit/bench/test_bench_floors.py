"""Floors and shapes against numbers worked out by hand, and against the figures that peers were measured by."""

from __future__ import annotations

import pytest

from bench import draws, floors, results
from bench.shapes import SHAPES, find
from bench.suites import scattermoe


def test_bytes_of_an_expert_by_hand() -> None:
    qwen = find("qwen3-30b")
    weights = 3 * 2048 * 768
    assert qwen.parameters == weights == 4_718_592
    assert floors.expert_bytes(qwen, "bf16") == 2 * weights
    assert floors.expert_bytes(qwen, "int8_channel") == weights + 2 * (2 * 768 + 2048)
    assert floors.expert_bytes(qwen, "int8") == weights + 2 * weights / 128
    assert floors.expert_bytes(qwen, "int4") == weights / 2 + 2 * weights / 128
    assert floors.expert_bytes(qwen, "int4_channel") == weights / 2 + 2 * (2 * 768 + 2048)
    assert floors.expert_bytes(qwen, "int4_mixed") == weights / 2 + 3 * weights / 128
    assert floors.expert_bytes(qwen, "int4_g32") == weights / 2 + 3 * weights / 32
    assert floors.expert_bytes(qwen, "fp8") == weights + 4 * weights / 128**2
    assert floors.expert_bytes(qwen, "mxfp4") == weights / 2 + weights / 32


def test_an_ungated_expert_has_two_matrices() -> None:
    assert find("scattermoe").parameters == 2 * 4096 * 2048


@pytest.mark.parametrize(
    ("name", "pairs", "active", "dtype", "wanted_us"),
    [
        # Memory-bound: 2 x 352.3 MB / 4.3 TB/s.
        ("mixtral", 2, 2, "bf16", 163.9),
        ("mixtral", 2, 2, "int4", 42.3),
        ("mixtral", 2, 2, "int8_channel", 82.0),
        ("qwen3-30b", 8, 8, "bf16", 17.56),
        ("qwen3-30b", 512 * 8, 128, "bf16", 280.9),
        # Compute-bound: 6 x 4096 x 14336 x 2 x 8192 / 790 TFLOP/s.
        ("mixtral", 8192 * 2, 8, "bf16", 7307),
        ("qwen3-30b", 8192 * 8, 128, "bf16", 783),
        ("olmoe", 2048 * 8, 64, "bf16", 261),
        # ScatterMoE's unit: 4 x 4096 x 2048 x 4 x 61440 / 790 TFLOP/s.
        ("scattermoe", 61_440 * 4, 32, "bf16", 10_440),
    ],
)
def test_floors_of_a_layer_match_the_published_table(
    name: str, pairs: int, active: int, dtype: str, wanted_us: float
) -> None:
    assert floors.layer_us(find(name), pairs, active, dtype) == pytest.approx(wanted_us, rel=2e-3)


@pytest.mark.parametrize(
    ("tokens", "active", "wanted_us"),
    [
        # Compute-bound: 3 x 10.44 ms.
        (61_440, 32, 31_330),
        # Memory-bound: 3 x 4 experts x 33.55 MB / 4.3 TB/s.
        (1, 4, 93.6),
    ],
)
def test_training_costs_three_forwards_in_arithmetic_and_in_bytes(tokens: int, active: int, wanted_us: float) -> None:
    shape = find("scattermoe")
    assert floors.training_us(shape, tokens * 4, active, "bf16") == pytest.approx(wanted_us, rel=2e-3)


def test_training_floors_at_paper_size_are_those_of_the_recorded_rows() -> None:
    """Arithmetic alone decides them: with tens of thousands of tokens, weights and gradients are little to move."""
    layers = [*map(scattermoe.granular, scattermoe.GRANULARITY), *map(scattermoe.sparse, scattermoe.SPARSITY)]
    shapes = {shape.name: shape for shape in (find("scattermoe"), scattermoe.dense(), *layers)}
    recorded = [results.parse(record) for record in results.read(results.DEFAULT_CSV)]
    training = [row for row in recorded if row.op == "mlp.training"]
    assert {row.shape for row in training} == set(shapes)
    for row in training:
        shape, pairs = shapes[row.shape], row.rows * shapes[row.shape].k
        floor_us = floors.training_us(shape, pairs, shape.E, row.dtype)
        assert floor_us == pytest.approx(row.floor_us, rel=1e-4), row
        assert floor_us == 3 * floors.compute_us(floors.layer_flops(shape, pairs))


def test_scaled_shapes_keep_experts_and_whole_groups() -> None:
    small = find("mixtral/32")
    assert (small.d, small.f, small.E, small.k) == (128, 384, 8, 2)
    assert find("qwen3-30b/1000").d == 128
    assert find("mixtral/1") == SHAPES["mixtral"]


@pytest.mark.parametrize("name", ["nope", "mixtral/x", "mixtral/-1", "mixtral/0", "mixtral/"])
def test_unknown_shapes_are_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(KeyError, match="qwen3-30b"):
        find(name)


def test_a_draw_counts_the_experts_that_it_hit() -> None:
    draw = draws.uniform(5, 64, 8)
    assert draw.active == len(draw.ids_TK.unique())
    assert draw.pairs == 40
    assert all(len(set(row)) == 8 for row in draw.ids_TK.tolist())
    assert draw.weights_TK.sum(1).tolist() == pytest.approx([1.0] * 5)
    assert draws.uniform(5, 64, 8).ids_TK.equal(draw.ids_TK)
    assert not draws.uniform(5, 64, 8, seed=1).ids_TK.equal(draw.ids_TK)


@pytest.mark.parametrize("active", [1, 4, 24, 32])
def test_an_even_draw_hits_exactly_as_many_experts_as_asked(active: int) -> None:
    draw = draws.over_first(active * 8, active, 1)
    assert draw.active == active
    assert draw.ids_TK.flatten().bincount().tolist() == [8] * active
