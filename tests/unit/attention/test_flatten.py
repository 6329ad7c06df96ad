"""Steps as tensors: decoding sequences as arrays kept from step to step, against each sequence taken by itself."""

from __future__ import annotations

import random

import torch
from testkit.models.engines import ask
from testkit.models.pieces import pieces

from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState, open_sequence
from services.attention.step.flatten import Flattener, split
from services.model.inputs import StepInputs

CPU = torch.device("cpu")


def sequence(number: int, length: int, block_size: int, draw: random.Random) -> SequenceState:
    known = [draw.randrange(1000) for _ in range(length)]
    state = open_sequence(ask(str(number), known[:1], 500, delivered=known[1:]), number, ())
    state.computed, state.prefilling = length - 1, False
    state.blocks = [draw.randrange(10_000) for _ in range(-(-length // block_size))]
    return state


def advance(state: SequenceState, block_size: int, draw: random.Random) -> None:
    """The step is done and the next one begins: a token more, and a block where it needs one."""
    state.computed += 1
    state.token_ids.append(draw.randrange(1000))
    if state.computed == len(state.blocks) * block_size:
        state.blocks.append(draw.randrange(10_000))


def assert_rows(inputs: StepInputs, plan: StepPlan, block_size: int) -> None:
    wanted = [(piece, position) for piece in pieces(plan) for position in range(piece.start, piece.end)]
    assert inputs.token_ids_T.tolist() == [piece.state.token_ids[at] for piece, at in wanted]
    assert inputs.positions_T.tolist() == [at for _, at in wanted]
    assert inputs.slots_T.tolist() == [
        piece.state.blocks[at // block_size] * block_size + at % block_size for piece, at in wanted
    ]
    assert inputs.sizes == [(piece.length, piece.end) for piece in pieces(plan)]
    rows = enumerate(wanted)
    assert inputs.logits_rows_R.tolist() == [row for row, (piece, at) in rows if piece.draws and at == piece.end - 1]
    for row, state in enumerate(plan.decodes):
        assert inputs.decodes is not None
        held = inputs.decodes.blocks_BM[row].tolist()
        assert held[: len(state.blocks)] == state.blocks
        assert set(held[len(state.blocks) :]) <= {state.blocks[-1]}, "padding is a block of the sequence's own"


def test_rows_are_right_whatever_comes_and_goes() -> None:
    """Sequences join, leave, come back with other blocks, skip steps; steps are asked for twice or one by one."""
    for seed in range(40):
        draw = random.Random(seed)
        block_size = draw.choice([1, 2, 4, 16])
        flattener, count = Flattener(block_size, CPU), 0
        running: list[SequenceState] = []
        decodes: tuple[SequenceState, ...] = ()
        for _ in range(30):
            if not running or draw.random() < 0.4:
                running.insert(
                    draw.randrange(len(running) + 1), sequence(count, draw.randrange(1, 90), block_size, draw)
                )
                count += 1
            if draw.random() < 0.3:
                gone = running.pop(draw.randrange(len(running)))
                gone.blocks = [draw.randrange(10_000) for _ in gone.blocks]  # preempted: it comes back with others
            chosen = tuple(state for state in running if draw.random() < 0.9)
            decodes = decodes if chosen == decodes else chosen  # the same object for the same sequences, as planned
            prompts = []
            if draw.random() < 0.3:
                state = sequence(count, 40, block_size, draw)
                prompts = [Piece(state=state, start=3, length=draw.choice([1, 20]), draws=True, scored=range(0))]
            plan = StepPlan(decodes=decodes, prompts=tuple(prompts))
            for asked in draw.choice([[plan], [plan, plan], [plan, *plan.one_by_one()]]):
                assert_rows(flattener.of(asked), asked, block_size)
            for state in decodes:
                advance(state, block_size, draw)


def test_micro_batches_are_the_step_cut_in_two() -> None:
    draw = random.Random(1)
    flattener = Flattener(4, CPU)
    decodes = tuple(sequence(number, 10 + number, 4, draw) for number in range(5))
    prompts = tuple(
        Piece(state=sequence(9, 40, 4, draw), start=0, length=length, draws=True, scored=range(0)) for length in (7, 3)
    )
    plan = StepPlan(decodes=decodes, prompts=prompts)
    inputs = flattener.of(plan)
    for at in range(1, 7):
        first, second = split(inputs, at)
        parts = (
            StepPlan(decodes=decodes[:at], prompts=prompts[: max(0, at - 5)]),
            StepPlan(decodes=decodes[at:], prompts=prompts[max(0, at - 5) :]),
        )
        for half, part in zip((first, second), parts, strict=True):
            alone = Flattener(4, CPU).of(part)
            assert half.token_ids_T.equal(alone.token_ids_T)
            assert half.slots_T.equal(alone.slots_T)
            assert half.sizes == alone.sizes
            assert half.sequences == alone.sequences
            assert half.decodes is None or len(half.decodes) == len(part.decodes)
    assert split(inputs, None) == (inputs,)
