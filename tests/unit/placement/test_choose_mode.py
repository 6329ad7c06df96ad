"""Attention and experts colocated or disaggregated: the limits of the equations."""

from __future__ import annotations

import dataclasses

import pytest

from services.errors import ConfigError
from services.placement.planning.choose_mode import DoesNotFit, Mode, choose_mode
from services.placement.planning.layer_times import Batch, Gpus, Kernels, Link, Shapes

SMALL = Shapes(hidden=2048, expert_width=1024, experts=64, top_k=8, layers=16)
BIG = Shapes(hidden=8192, expert_width=16384, experts=16, top_k=2, layers=60)
NVLINK, TCP = Link(bandwidth=400e9, latency=7e-6), Link(bandwidth=1.2e9, latency=60e-6)
GPUS = Gpus(count=32, bandwidth=4.8e12, flops=800e12, memory=141e9)
TWENTY = dataclasses.replace(GPUS, count=20)


@pytest.mark.parametrize(
    ("shapes", "link", "tokens"),
    [(SMALL, TCP, 16), (SMALL, TCP, 1024), (SMALL, TCP, 65536), (SMALL, NVLINK, 4096), (BIG, NVLINK, 32)],
)
def test_small_experts_or_a_small_batch_stay_colocated(shapes: Shapes, link: Link, tokens: int) -> None:
    mode = choose_mode(shapes, link, GPUS, Batch(tokens=tokens))
    assert mode.choice == "colocated"
    if link == TCP:
        assert mode.degree == 1
        assert mode.reason.startswith("Every GPU has all experts: a layer takes")


def test_big_experts_and_a_big_batch_are_disaggregated_in_ping_pong() -> None:
    mode = choose_mode(BIG, NVLINK, TWENTY, Batch(tokens=4096))
    assert mode.choice == "pingpong"
    assert mode.attention + mode.experts == 20
    assert mode.reason == (
        f"Disaggregated, in ping-pong: a layer takes {mode.pingpong_s * 1e6:,.1f} us with {mode.attention} + "
        f"{mode.experts} GPUs for attention and experts, and {mode.colocated_s * 1e6:,.1f} us where all 20 do both."
    )


def test_ping_pong_hides_the_link_where_work_is_in_proportion_to_rows() -> None:
    mode = choose_mode(BIG, Link(bandwidth=100e9, latency=0), TWENTY, Batch(tokens=65536))
    assert mode.pingpong_s < 0.6 * mode.disaggregated_s


def test_ping_pong_is_no_gain_where_weights_are_read_twice() -> None:
    two = dataclasses.replace(GPUS, count=2, memory=1e15)
    mode = choose_mode(BIG, Link(bandwidth=1e15, latency=0), two, Batch(tokens=256))
    assert mode.pingpong_s > 1.8 * mode.disaggregated_s


def test_one_gpu_has_no_choice() -> None:
    mode = choose_mode(SMALL, NVLINK, dataclasses.replace(GPUS, count=1), Batch(tokens=8))
    assert (mode.choice, mode.degree, mode.attention, mode.experts) == ("colocated", 1, 0, 0)
    assert mode.reason == "One GPU does all."


def test_the_hand_computed_layer() -> None:
    shapes = Shapes(hidden=10, expert_width=10, experts=2, top_k=2, layers=1, weight_bytes=1)
    kernels = Kernels(launch_s=7, dense=3, call=2)
    gpus = Gpus(count=2, bandwidth=1.0, flops=1e12, memory=1100, kernels=kernels)
    mode = choose_mode(shapes, Link(bandwidth=1.0, latency=500), gpus, Batch(tokens=4))
    assert mode.degree == 1
    assert mode.colocated_s == pytest.approx(400 + 21 + 600 + 14)  # all experts on each GPU: 3 * 10 * 10 * 2 bytes
    shared = choose_mode(shapes, Link(bandwidth=1.0, latency=5), dataclasses.replace(gpus, memory=750), Batch(tokens=4))
    rows = 2 * (2 * (1 - 0.5**2)) * 1 / 2  # two tokens each, 1.5 GPUs per row, half of them the other one
    assert shared.colocated_s == pytest.approx(400 + 21 + 2 * (5 + rows * 2 * 10 / 1) + 300 + 14)
    assert shared.disaggregated_s == pytest.approx(400 + 21 + 2 * (5 + 4 * 10 * 2) + 600 + 14)
    assert shared.pingpong_s == pytest.approx(max(842, 1228, 421 + 614 + 2 * (5 + 2 * 10 * 2)))


def test_gpus_that_share_experts_may_have_another_link_by_their_number() -> None:
    few = dataclasses.replace(GPUS, count=4, memory=80e9)
    slow = Link(bandwidth=400e9, latency=1e-3)

    def together(degree: int) -> Link:
        return NVLINK if degree <= 2 else slow

    big = dataclasses.replace(BIG, layers=10)
    assert choose_mode(big, slow, few, Batch(tokens=8), together=together).degree == 2
    assert choose_mode(big, slow, few, Batch(tokens=8), together=lambda _: NVLINK).degree == 4


def test_hot_experts_cost_time_where_gpus_share_them() -> None:
    even, hot = (choose_mode(BIG, NVLINK, GPUS, Batch(tokens=4096, skew=skew)) for skew in (1.0, 2.0))
    assert hot.colocated_s > even.colocated_s
    assert hot.disaggregated_s > even.disaggregated_s


def test_memory_forces_the_experts_elsewhere() -> None:
    shapes = Shapes(hidden=1000, expert_width=10, experts=2, top_k=1, layers=1, weight_bytes=1)
    gpus = Gpus(count=2, bandwidth=1e9, flops=1e12, memory=4.02e6)
    mode = choose_mode(shapes, NVLINK, gpus, Batch(tokens=4))
    assert mode.colocated_s == float("inf")
    assert mode.reason.startswith(
        "Disaggregated: no GPU has memory for attention, its requests' KV cache and its share"
    )


def test_keys_and_values_take_memory_where_attention_is() -> None:
    """Two GPUs: each has half of the experts, 30 kB, and 4 kB of dense weights; or one of them has all 60 kB."""
    shapes = Shapes(hidden=100, expert_width=100, experts=2, top_k=1, layers=1, weight_bytes=1, dense_weights=4000)

    def mode(memory: float, tokens: int) -> Mode:
        gpus = Gpus(count=2, bandwidth=1e9, flops=1e12, memory=memory)
        return choose_mode(shapes, NVLINK, gpus, Batch(tokens=tokens, kv_bytes=1000))

    assert mode(40e3, 12).choice == "colocated", "6 kB for six requests on each"
    with pytest.raises(DoesNotFit, match=r"2 GPUs of 0 GB each cannot hold the model and a batch of 14\."):
        mode(40e3, 14)
    assert mode(60e3, 56).colocated_s == float("inf")
    assert mode(60e3, 56).reason.startswith("Disaggregated: no GPU has memory for attention")


def test_every_gpu_that_shares_experts_has_one() -> None:
    two = dataclasses.replace(BIG, experts=2, layers=1)
    mode = choose_mode(two, NVLINK, dataclasses.replace(GPUS, count=8), Batch(tokens=4096))
    assert mode.degree <= 2
    assert mode.experts <= 2


def test_attention_takes_a_constant_and_a_time_for_each_row() -> None:
    kernels = Kernels(attention_s=1.0, row_s=0.5)
    one = dataclasses.replace(GPUS, count=1)
    without, with_ = (
        choose_mode(SMALL, NVLINK, gpus, Batch(tokens=8)).colocated_s
        for gpus in (one, dataclasses.replace(one, kernels=kernels))
    )
    assert with_ - without == pytest.approx(1.0 + 0.5 * 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"gpus": dataclasses.replace(GPUS, memory=1e9)},
            "32 GPUs of 1 GB each cannot hold the model and a batch of 8",
        ),
        ({"gpus": dataclasses.replace(GPUS, flops=0)}, "flops = 0"),
        ({"batch": Batch(tokens=0)}, "tokens = 0"),
        ({"link": Link(bandwidth=-1, latency=0)}, "bandwidth = -1"),
        ({"shapes": dataclasses.replace(BIG, top_k=17)}, "17 of 16 experts"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    arguments = {"shapes": BIG, "link": NVLINK, "gpus": GPUS, "batch": Batch(tokens=8)} | change
    with pytest.raises(ConfigError, match=said):
        choose_mode(**arguments)
