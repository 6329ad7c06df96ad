"""Attention of whole steps against its definition: decodes, prompts and a few rows each, in any blocks, cut or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.attention_steps import NO_BLOCK, Step, small_tiling
from testkit.models.guarded import guarded
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, backend
from moe_kernels.paged_attention.op import paged_attention
from moe_kernels.paged_attention.planner import Planner
from moe_kernels.paged_attention.work import Work

MIX = [(1, 1), (1, 40), (20, 20), (3, 50), (0, 7), (34, 61), (12, 44)]
"""Decodes, a prompt from its start, rows to verify, a sequence that waits, a chunk of a prompt."""
ONE = [(1, 37)]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("window", [None, 1, 9, 30])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block"), [(4, 2, 16, 16), (6, 2, 24, 32), (3, 3, 64, 64), (20, 1, 8, 5)]
)
def test_equals_the_definition(heads: int, kv_heads: int, head_dim: int, block: int, window: int | None) -> None:
    step = Step(MIX, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block=block, window=window, spare=3)
    assert_close(step(), step.expected())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("prompts", [True, False])
def test_cut_at_multiples(prompts: bool, window: int | None) -> None:
    """Without wide tiles long prompts are cut too."""
    step = Step(MIX, split=16, window=window, tiling=small_tiling(2, 1, 16, prompts=prompts), sinks=True, spare=2)
    assert int(step.work.words_W[1]) > 3
    assert_close(step(), step.expected())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("sinks", [False, True])
def test_cut_by_the_batch(sinks: bool) -> None:
    """One decode of many positions and some rows to verify, for many programs."""
    step = Step([(1, 1100), (9, 700)], sinks=sinks, tiling=replace(small_tiling(2, 1, 16, programs=16), length=64))
    assert int(step.work.words_W[0]) > 4
    assert int(step.work.words_W[1]) == 10
    assert_close(step(), step.expected(), roundings=32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("softcap", [None, 1.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap_and_sinks(sinks: bool, softcap: float | None) -> None:
    step = Step(MIX[:4], heads=4, kv_heads=2, softcap=softcap, sinks=sinks, split=32)
    assert_close(step(), step.expected(), roundings=32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    step = Step([(1, 40), (20, 33)], heads=4, kv_heads=2, head_dim=32, dtype=dtype, sinks=True, split=32)
    assert step().dtype == dtype
    assert_close(step(), step.expected())


SEQUENCES = st.integers(0, 40).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(max(rows, 1), 70)))


@pytest.mark.usefixtures("path")
@settings(max_examples=10, deadline=None)
@given(
    st.lists(SEQUENCES, max_size=4), st.sampled_from([(1, 1), (2, 1), (4, 2), (5, 1)]), st.sampled_from([16, 32, 64]),
    st.none() | st.integers(1, 80), st.sampled_from([None, 16, 48]), st.booleans(), st.none() | st.just(2.0),
    st.integers(0, 4), st.booleans(),
)  # fmt: skip
def test_any_step(
    sequences: list[tuple[int, int]], heads: tuple[int, int], block: int, window: int | None, split: int | None,
    sinks: bool, softcap: float | None, spare: int, prompts: bool,
) -> None:  # fmt: skip
    step = Step(
        sequences, heads=heads[0], kv_heads=heads[1], head_dim=8, block=block, window=window, split=split, sinks=sinks,
        softcap=softcap, spare=spare, tiling=small_tiling(*heads, 8, prompts=prompts),
    )  # fmt: skip
    assert_close(step(), step.expected(), roundings=32)


@pytest.mark.parametrize("edge", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("window", [None, 16])
def test_rows_at_the_edges_of_blocks_and_tiles(edge: int, window: int | None) -> None:
    step = Step([(1, edge), (2, edge + 1), (edge, edge), (edge, 2 * edge)], window=window)
    with backend.forced("triton"):
        assert_close(step(), step.expected())


@pytest.mark.usefixtures("path")
def test_a_list_is_filled_again_with_less() -> None:
    """What a longer step left in the list, in buffers and in the cache is not looked at."""
    long = Step([(1, 60), (30, 40), (2, 50)], split=16, spare=2, positions=64)
    short = Step([(1, 20), (1, 1)], split=16, spare=33, positions=64)
    assert long.planner.room == short.planner.room
    assert_close(long(), long.expected())
    short.work = replace(short.work, words_W=long.work.words_W)
    words = short.words()
    count = int(words[0])
    used = 8 + 8 * count, short.planner.room.merged_at, short.planner.room.merged_at + 4 * int(words[1])
    short.work.words_W[: used[0]] = words[: used[0]]
    short.work.words_W[used[1] : used[2]] = words[used[1] : used[2]]
    assert count < int(long.words()[0])
    assert_close(short(), short.expected())


@pytest.mark.parametrize("mine", [(1, 100), (5, 77), (12, 90), (40, 40)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_neighbours_change_no_bit_where_the_split_is_fixed(mine: tuple[int, int], sinks: bool) -> None:
    """The same bits alone, first and last of a batch, with other room and other programs."""
    mates: list[list[tuple[int, int]]] = [[], [(1, 130), (33, 60)], [(1, 9)] * 6]
    found = []
    for number, mate in enumerate(mates):
        sequences, seeds = [mine, *mate], [7, *range(20, 20 + len(mate))]
        if number == 1:
            sequences, seeds = sequences[::-1], seeds[::-1]
        tiling = small_tiling(4, 2, 16, programs=2 + number)
        step = Step(sequences, heads=4, kv_heads=2, seeds=seeds, split=32, sinks=sinks, tiling=tiling, spare=number)
        with backend.forced("triton"):
            found.append(step.of(sequences.index(mine), step()))
        assert_close(found[-1], step.of(sequences.index(mine), step.expected()))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_equal_lists_give_equal_bits() -> None:
    step = Step([(1, 1100), (9, 700)], tiling=replace(small_tiling(2, 1, 16, programs=16), length=64))
    with backend.forced("triton"):
        assert torch.equal(step(), step())


@pytest.mark.usefixtures("path")
def test_nothing_is_touched_past_any_tensor() -> None:
    """The last block of the cache is in use; its last place lies before a page that nobody may read."""
    step = Step(
        [(1, 7), (11, 13)], heads=6, kv_heads=2, head_dim=24, block=5, dtype=torch.float16, sinks=True, split=16
    )
    expected = step.expected()
    used = torch.unique(step.blocks[step.blocks != NO_BLOCK])
    moved = torch.full((int(used.max()) + 1,), NO_BLOCK)
    moved[used] = torch.arange(len(used))
    step.blocks = torch.where(step.blocks == NO_BLOCK, NO_BLOCK, moved[step.blocks.clamp(max=int(used.max()))])
    assert step.sinks is not None
    step.q, step.blocks, step.sinks = guarded(step.q), guarded(step.blocks), guarded(step.sinks)
    step.k, step.v = guarded(step.k[used]), guarded(step.v[used])
    step.work = replace(step.work, words_W=guarded(step.work.words_W))
    assert_close(step(), expected)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan_stays_with_its_sequence(where: str) -> None:
    step = Step([(1, 50), (3, 50), (20, 20)], split=16)
    if where == "q":
        step.q[1] = torch.nan
    else:
        getattr(step, where)[step.blocks[1, 0], 3] = torch.nan
    out = step()
    assert out[1].isnan().all()
    for sequence in (0, 2):
        assert_close(step.of(sequence, out), step.of(sequence, step.expected()))


@pytest.mark.usefixtures("path")
def test_a_scale_of_its_own() -> None:
    step = Step(ONE, heads=1)
    assert_close(step(scale=0.0)[0, 0], step.values[0][:, 0].double().mean(0))


@pytest.mark.usefixtures("path")
def test_the_worked_example() -> None:
    planner = Planner(small_tiling(1, 1, 1), rows=2, sequences=1, positions=2)
    work = Work.empty(planner, "cpu").fill(torch.from_numpy(planner.plan([2], [2])))
    arguments = torch.zeros(2, 1, 1), torch.ones(1, 2, 1, 1), torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
    blocks = torch.zeros(1, 1, dtype=torch.int64)
    assert paged_attention(*arguments, blocks, work, scale=1.0).flatten().tolist() == [2.0, 3.0]
    with_sink = paged_attention(*arguments, blocks, work, scale=1.0, sinks_N=torch.zeros(1))
    assert_close(with_sink.flatten(), torch.tensor([1.0, 2.0]))


@pytest.mark.usefixtures("path")
def test_no_rows_and_no_sequences() -> None:
    assert Step([])().shape == (0, 2, 16)
    assert Step([(0, 5)])().shape == (0, 2, 16)
    assert torch.equal(Step([], spare=5)(), torch.zeros(5, 2, 16))


BAD: list[tuple[dict[str, object], str]] = [
    ({"q": torch.zeros(1, 16)}, r"q must be \[T, N, H\]"),
    ({"q": torch.zeros(1, 2, 16, dtype=torch.float64)}, "q must be"),
    ({"q": torch.zeros(2, 2, 16)}, "work is for 1 rows, found q of 2"),
    ({"q": torch.zeros(1, 4, 16)}, r"work is for .*\(1, 2, 16\), found \(1, 4, 16\)"),
    ({"q": torch.zeros(1, 2, 8)}, r"k must be \[P, B, J, 8\]"),
    ({"q": torch.zeros(1, 2, 300)}, "size of q's heads must be at most 256, found 300"),
    ({"q": torch.zeros(1, 16, 2).mT}, "q must have unit stride"),
    ({"q": torch.zeros(1, 2, 16, requires_grad=True)}, "no backward pass"),
    ({"q": [1]}, "q must be a tensor, found list"),
    ({"k": torch.zeros(4, 16, 1, 16)[::2]}, "contiguous"),
    ({"k": torch.zeros(4, 16, 3, 16), "v": torch.zeros(4, 16, 3, 16)}, "2 query heads do not divide into 3"),
    ({"v": torch.zeros(4, 16, 1, 16, dtype=torch.float16)}, "k and v must be alike"),
    ({"blocks": torch.zeros(0, 3, dtype=torch.int64)}, r"blocks must be int32 or int64 \[S >= 8, M x 16 >= 37\]"),
    ({"blocks": torch.zeros(8, 2, dtype=torch.int64)}, r"M x 16 >= 37\], found .*\(8, 2\)"),
    ({"blocks": torch.zeros(8, 3)}, "blocks must be int32 or int64"),
    ({"work": None}, "work must be a Work, found None"),
    ({"scale": "x"}, "scale must be a finite number, found str 'x'"),
    ({"scale": torch.inf}, "scale must be a finite number"),
    ({"softcap": 0.0}, "softcap must be positive, found 0.0"),
    ({"softcap": True}, "softcap must be a finite number, found bool True"),
    ({"sinks": torch.zeros(3)}, r"sinks must be \[2\]"),
    ({"sinks": torch.zeros(2, dtype=torch.int32)}, r"sinks must be \[2\]"),
]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_arguments(change: dict[str, object], words: str) -> None:
    step = Step(ONE)
    given = {"q": step.q, "k": step.k, "v": step.v, "blocks": step.blocks, "work": step.work} | change
    options = {name: given.pop(name) for name in ("scale", "softcap") if name in given}
    options["sinks_N"] = given.pop("sinks", None)
    with pytest.raises(ArgumentError, match=words):
        paged_attention(*given.values(), **options)  # type: ignore[arg-type]


def test_words_of_another_list() -> None:
    step = Step(ONE)
    step.work = replace(step.work, words_W=step.work.words_W[:-1])
    with pytest.raises(ArgumentError, match=r"the words of work must be .* of shape"):
        step()


def test_both_ways_are_taken() -> None:
    """The fixture's two ways are two: in float32 they differ in some bit."""
    step = Step(MIX)
    ways: list[Tensor] = []
    for path in ("torch", "triton"):
        with backend.forced(path):  # type: ignore[arg-type]
            ways.append(step())
    assert not torch.equal(*ways)
