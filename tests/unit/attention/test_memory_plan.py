"""What a worker makes of its GPU's memory: blocks, sequences and tokens, or what to change. The numbers are made up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.attention.setup.batch_size import GPUS, WITHOUT_GPU, BatchSize, batch_size, seqs_within
from services.attention.setup.memory_plan import (
    CONTEXT_BYTES,
    GIB,
    GRAPHS_BYTES,
    SPARE_BYTES,
    Demand,
    GpuMemory,
    KVShape,
    Share,
    check_weights,
    exchange_demand,
    experts_demand,
    graphs_demand,
    kv_blocks,
)
from services.attention.setup.worker_plan import Asked, Measured, WorkerPlan, fitting
from services.errors import OutOfMemory

MIB = 1 << 20
SHAPE = KVShape(block_size=16, block_bytes=2 * MIB)
STEP = 8192
H200 = GpuMemory(total=140 * GIB, free=126 * GIB, allocated=13 * GIB)
"""With 13 GiB of weights and a context of 1 GiB."""
DEMAND = Demand(activations=2 * GIB, graphs=3 * GIB, exchange=GIB)
SHARE = Share(utilization=0.9)


def blocks(memory: GpuMemory = H200, share: Share = SHARE, demand: Demand = DEMAND, least: int = 2048) -> int:
    return kv_blocks(memory, share, demand, SHAPE, least_tokens=least, step=STEP)


def refused(memory: GpuMemory = H200, share: Share = SHARE, demand: Demand = DEMAND, least: int = 2048) -> str:
    with pytest.raises(OutOfMemory) as refusal:
        blocks(memory, share, demand, least)
    return refusal.value.message


def test_the_kv_cache_takes_the_rest_of_the_share() -> None:
    assert blocks() == (140 * 0.9 - 14 - 6) * GIB // (2 * MIB)
    assert blocks(share=Share(utilization=0.5)) == (70 - 20) * GIB // (2 * MIB)


def test_workers_on_one_gpu_do_not_sum_up_beyond_it() -> None:
    """Whoever comes first, and although the others' memory is still free."""
    share = Share(utilization=0.9, workers=2, reserved=30 * GIB)
    first = blocks(replace(H200, free=126 * GIB), share)
    assert first == (48 - 20) * GIB // (2 * MIB)
    later = replace(H200, free=H200.free - 48 * GIB - 30 * GIB)
    assert blocks(later, share) == first
    assert 2 * (14 * GIB + DEMAND.total + first * SHAPE.block_bytes) + share.reserved <= 0.9 * 140 * GIB


def test_what_others_hold_is_never_taken() -> None:
    crowded = replace(H200, free=30 * GIB)
    assert blocks(crowded) == (30 * GIB - SPARE_BYTES - 6 * GIB) // (2 * MIB)


@given(
    st.integers(8, 200), st.integers(0, 200), st.integers(0, 200), st.floats(0.05, 1.0), st.integers(1, 4),
    st.integers(0, 40), st.integers(0, 10), st.integers(0, 10),
)  # fmt: skip
def test_no_plan_exceeds_the_share_or_what_is_free(
    total: int, free: int, allocated: int, utilization: float, workers: int, reserved: int, acts: int, graphs: int
) -> None:
    assume(free + allocated <= total)
    memory = GpuMemory(total=total * GIB, free=free * GIB, allocated=allocated * GIB)
    share = Share(utilization=utilization, workers=workers, reserved=reserved * GIB)
    demand = Demand(activations=acts * GIB, graphs=graphs * GIB)
    try:
        found = blocks(memory, share, demand) * SHAPE.block_bytes
    except OutOfMemory as error:
        check_the_way_out(error.message, memory, share, demand)
        return
    assert found + demand.total <= memory.free - SPARE_BYTES
    assert workers * (memory.own + demand.total + found) + share.reserved <= utilization * memory.total + workers


def check_the_way_out(message: str, memory: GpuMemory, share: Share, demand: Demand) -> None:
    """What the hint says helps, where it names a value."""
    if found := re.search(r"--gpu-memory-utilization (\S+), which", message):
        assert blocks(memory, replace(share, utilization=float(found[1])), demand) >= 128
    if found := re.search(r"--max-num-batched-tokens (\d+), which", message):
        part = int(found[1]) / STEP
        less = Demand(activations=int(demand.activations * part), graphs=int(demand.graphs * part))
        assert blocks(memory, share, less) >= 128


def test_a_share_that_is_too_small_says_which_would_do() -> None:
    message = refused(share=Share(utilization=0.1))
    assert "would hold 0 tokens, and 2,048 are needed: of 140.0 GiB" in message
    assert (
        "weights and the rest of this worker take 14.0, activations 2.0, CUDA graphs 3.0, the exchange 1.0" in message
    )
    assert message.endswith("Give --gpu-memory-utilization 0.15, which is 0.1 now.")
    assert blocks(share=Share(utilization=0.15)) >= 128


def test_memory_that_others_hold_is_named() -> None:
    message = refused(replace(H200, free=4 * GIB))
    assert "Other processes hold 122.0 GiB of this GPU: end them" in message
    assert "--device" in message


def test_steps_that_are_too_large_say_how_small_they_must_be() -> None:
    small = GpuMemory(total=24 * GIB, free=9 * GIB, allocated=14 * GIB)
    message = refused(small, demand=Demand(activations=5 * GIB, graphs=5 * GIB), share=Share(utilization=0.98))
    assert message.endswith("Give --max-num-batched-tokens 4096, which is 8192 now.")
    full = GpuMemory(total=24 * GIB, free=GIB, allocated=22 * GIB)
    assert "--layout colocated --workers N" in refused(full)


def test_a_length_that_was_asked_for_has_to_fit() -> None:
    assert blocks(least=16 * 50_000) >= 50_000
    assert "--layout colocated" in refused(least=16 * 80_000)


def test_weights_without_room_are_refused_before_they_are_read() -> None:
    empty = GpuMemory(total=80 * GIB, free=79 * GIB, allocated=0)
    check_weights(empty, SHARE, 57 * GIB)
    with pytest.raises(OutOfMemory, match=r"take 90.0 GiB, and 71.0 of the GPU's 80.0 GiB can be used.*--layout coloc"):
        check_weights(empty, SHARE, 90 * GIB)
    with pytest.raises(OutOfMemory, match=r"Give --gpu-memory-utilization 0.73, which is 0.5 now"):
        check_weights(empty, Share(utilization=0.5), 57 * GIB)
    with pytest.raises(OutOfMemory, match=r"Other processes hold 59\.0 GiB"):
        check_weights(replace(empty, free=20 * GIB), SHARE, 57 * GIB)


def test_only_a_contexts_worth_of_foreign_memory_counts_as_ones_own() -> None:
    assert (H200.own, H200.others) == (14 * GIB, 0)
    crowded = replace(H200, free=100 * GIB)
    assert (crowded.own, crowded.others) == (13 * GIB + CONTEXT_BYTES, 26 * GIB)
    small = replace(H200, free=H200.total - H200.allocated - 400 * MIB)
    assert (small.own, small.others) == (13 * GIB + 400 * MIB, 0)


def test_what_steps_need_besides_is_added_up() -> None:
    assert DEMAND.total == 6 * GIB
    assert graphs_demand(GIB, captured=True) == GIB + GRAPHS_BYTES
    assert graphs_demand(GIB, captured=True, models=2) == GIB + 2 * GRAPHS_BYTES
    assert graphs_demand(GIB, captured=False) == 0
    assert exchange_demand(10, hidden=4, slots=2, itemsize=2, peers=3) == 2 * 3 * 10 * (2 * 4 * 2 + 2 * 8)
    assert experts_demand(10, hidden=4, width=3, slots=2, itemsize=2) == 10 * 2 * (9 + 4) * 2


# sequences and tokens


def test_without_a_gpu_nothing_changes() -> None:
    assert batch_size(seqs=None, tokens=None, gpu_bytes=None) == WITHOUT_GPU == BatchSize(
        max_num_seqs=64, max_num_batched_tokens=512
    )  # fmt: skip
    assert batch_size(seqs=7, tokens=None, gpu_bytes=None) == replace(WITHOUT_GPU, max_num_seqs=7)


@pytest.mark.parametrize("gib", [8, 24, 40, 80, 141])
def test_a_gpus_defaults_follow_its_memory_and_leave_room_for_prompts(gib: int) -> None:
    found = batch_size(seqs=None, tokens=None, gpu_bytes=gib * GIB)
    usual = next(size for least, size in GPUS if gib * GIB >= least)
    assert found.max_num_batched_tokens == usual.max_num_batched_tokens
    assert found.max_num_seqs <= usual.max_num_seqs
    assert found.max_num_batched_tokens - found.max_num_seqs >= found.max_num_batched_tokens // 8


def test_an_h200_has_512_sequences_where_its_steps_are_long_enough() -> None:
    assert batch_size(seqs=None, tokens=8192, gpu_bytes=141 * GIB).max_num_seqs == 512
    assert GPUS[0][1] == BatchSize(max_num_seqs=512, max_num_batched_tokens=8192)


@given(st.integers(1, 5000), st.integers(1, 20_000), st.none() | st.integers(0, 200 * GIB))
def test_what_is_asked_for_wins(seqs: int, tokens: int, gpu_bytes: int | None) -> None:
    given = BatchSize(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert batch_size(seqs=seqs, tokens=tokens, gpu_bytes=gpu_bytes) == given
    assert batch_size(seqs=None, tokens=tokens, gpu_bytes=gpu_bytes).max_num_seqs >= 1


# the plan


def plan(asked: Asked, memory: GpuMemory = H200, **share: int) -> WorkerPlan:
    size = BatchSize(
        max_num_seqs=512 if asked.max_num_seqs is None else asked.max_num_seqs, max_num_batched_tokens=STEP
    )
    measured = Measured(memory=memory, share=Share(**{"utilization": 0.9, **share}), demand=DEMAND)  # type: ignore[arg-type]
    return fitting(size, asked, measured, SHAPE, 4096)


def test_the_plan_is_one_line_that_adds_up() -> None:
    found = plan(Asked(max_model_len=None, max_num_seqs=None))
    assert found.line() == (
        "memory plan: 126.0 of the GPU's 140.0 GiB (--gpu-memory-utilization 0.9): weights 13.0, CUDA context 1.0, "
        "activations 2.0, CUDA graphs 3.0, exchange 1.0 GiB; KV cache 106.0 GiB = 54,272 blocks = 868,352 tokens; "
        "512 sequences and 8,192 tokens in a step; contexts of up to 4,096 tokens"
    )
    divided = plan(Asked(max_model_len=None, max_num_seqs=None), workers=2, reserved=10 * GIB)
    assert (
        "58.0 of the GPU's 140.0 GiB (--gpu-memory-utilization 0.9 by 2 workers without 10.0 GiB of" in divided.line()
    )


def test_few_kv_blocks_are_good_for_few_sequences_unless_more_were_asked_for() -> None:
    tight = replace(H200, free=12 * GIB)
    few = plan(Asked(max_model_len=None, max_num_seqs=None), tight)
    assert few.room.kv_tokens == 2816 * 16
    assert few.size.max_num_seqs == seqs_within(2816 * 16, 512) == 176
    assert plan(Asked(max_model_len=None, max_num_seqs=500), tight).size.max_num_seqs == 500


def test_a_context_shorter_than_the_least_kv_cache_is_enough() -> None:
    tight = replace(H200, free=6 * GIB + SPARE_BYTES + 40 * MIB)
    assert plan(Asked(max_model_len=320, max_num_seqs=None), tight).room.max_model_len == 320
    with pytest.raises(OutOfMemory, match="hold 320 tokens, and 2,048 are needed"):
        plan(Asked(max_model_len=None, max_num_seqs=None), tight)
