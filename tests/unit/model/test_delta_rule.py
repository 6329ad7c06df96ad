"""The gated delta rule: by chunks, by steps, by definition, wherever sequences are cut and where states are kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.model.delta_rule import CHUNK
from services.model.inputs import DecodeRows, SequenceRows, StateRows, StepInputs
from services.model.recurrent import Recurrence, RecurrentWeights
from services.model.recurrent_names import A_LOG, CONV, DT_BIAS, NORM, OUT, in_projections
from services.model.recurrent_reference import recurrent_output
from services.model.spec import RecurrentSpec
from services.model.state_plan import plan_states
from services.model.state_room import FIRST_SLOT, SPARE_SLOT, ZERO_SLOT, Kept

CPU, EPS, WIDTH, SLOTS = torch.device("cpu"), 1e-3, 20, 12
EXACT = 2e-5
BY_HEAD = RecurrentSpec(key_heads=2, value_heads=6, key_dim=10, value_dim=14, conv=4, by_head=True)
BY_PART = RecurrentSpec(key_heads=3, value_heads=3, key_dim=7, value_dim=5, conv=2, by_head=False)


class Layer:
    """A layer with random weights, its oracle, and its states, which are full of junk where nobody has written."""

    def __init__(self, spec: RecurrentSpec) -> None:
        draw = torch.Generator().manual_seed(3)
        shapes: dict[str, tuple[int, ...]] = {name: (rows, WIDTH) for name, rows in in_projections(spec).items()}
        shapes |= {CONV: (spec.channels, 1, spec.conv), DT_BIAS: (spec.value_heads,), A_LOG: (spec.value_heads,)}
        shapes |= {NORM: (spec.value_dim,), OUT: (WIDTH, spec.values)}
        self.spec = spec
        self.tensors = {
            name: torch.randn(shape, generator=draw) * (2 if name == CONV else shape[-1] ** -0.5)
            for name, shape in shapes.items()
        }
        weights = RecurrentWeights(
            conv_C1W=self.tensors[CONV],
            dt_bias_H=self.tensors[DT_BIAS],
            a_log_H=self.tensors[A_LOG],
            norm_V=self.tensors[NORM],
        )
        self.recurrence = Recurrence(spec, weights, EPS)
        shape = (SLOTS + FIRST_SLOT, spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = torch.randn(shape[0], spec.conv - 1, spec.channels), torch.randn(shape)
        for part in self.states:
            part[ZERO_SLOT] = 0

    def wanted(self, h_TD: Tensor) -> Tensor:
        return recurrent_output(self.spec, self.tensors.__getitem__, h_TD, EPS)

    def step(self, rows: Sequence[Tensor], decodes: int, states: StateRows) -> list[Tensor]:
        """Pass the rows of each sequence, of which the first ``decodes`` have one."""
        h_TD, lengths = torch.cat(list(rows)), [len(one) for one in rows]
        starts = [sum(lengths[:at]) for at in range(len(lengths))]
        inputs = StepInputs(
            token_ids_T=torch.zeros(len(h_TD), dtype=torch.int64),
            positions_T=torch.zeros(len(h_TD), dtype=torch.int64),
            slots_T=torch.zeros(len(h_TD), dtype=torch.int64),
            sequences=tuple(
                SequenceRows(start=start, length=length, kv_len=length, blocks=[])
                for start, length in list(zip(starts, lengths, strict=True))[decodes:]
            ),
            logits_rows_R=torch.zeros(0, dtype=torch.int64),
            decodes=None
            if not decodes
            else DecodeRows(kv_len_B=states.read_S.numpy(), blocks_BM=states.read_S.numpy()),
            states=states,
        )
        projected_TO = h_TD @ torch.cat([self.tensors[name] for name in in_projections(self.spec)]).T
        plan = plan_states(inputs, self.spec.conv - 1, CPU)
        out_TD = self.recurrence(projected_TO, plan, self.states) @ self.tensors[OUT].T
        return list(out_TD.split(lengths))


def slots(read: Sequence[int], write: Sequence[int], kept: Sequence[Kept] = ()) -> StateRows:
    return StateRows(read_S=torch.tensor(read), write_S=torch.tensor(write), kept=tuple(kept))


def rows(length: int, seed: int) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", [BY_HEAD, BY_PART], ids=["by head", "by part"])
@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_and_steps_equal_the_definition(spec: RecurrentSpec, length: int) -> None:
    layer, h_TD = Layer(spec), rows(length, 1)
    wanted_TD = layer.wanted(h_TD)
    [at_once_TD] = layer.step([h_TD], 0, slots([ZERO_SLOT], [3]))
    torch.testing.assert_close(at_once_TD, wanted_TD, atol=EXACT, rtol=EXACT)
    parts, slot = [], ZERO_SLOT
    for at in range(length):
        parts += layer.step([h_TD[at : at + 1]], 1, slots([slot], [5 + at % 2]))
        slot = 5 + at % 2
    torch.testing.assert_close(torch.cat(parts), wanted_TD, atol=EXACT, rtol=EXACT)
    for part in layer.states:
        torch.testing.assert_close(part[3], part[slot], atol=EXACT, rtol=EXACT)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sequences_side_by_side_cut_anywhere(data: st.DataObject) -> None:
    """Each has rows and pieces of its own. At some cuts within a piece a state is kept, and goes on elsewhere."""
    layer = Layer(BY_HEAD)
    count = data.draw(st.integers(1, 4))
    whole = [rows(data.draw(st.integers(1, 150)), seed) for seed in range(count)]
    wanted = [layer.wanted(one) for one in whole]
    done, slot, got = [0] * count, [ZERO_SLOT] * count, [list[Tensor]() for _ in whole]
    free = list(range(FIRST_SLOT, FIRST_SLOT + SLOTS))
    while active := [at for at in range(count) if done[at] < len(whole[at])]:
        lengths = {at: data.draw(st.integers(1, len(whole[at]) - done[at])) for at in active}
        alone = [at for at in active if lengths[at] == 1 and data.draw(st.booleans())]
        order = alone + [at for at in active if at not in alone]
        write = [free.pop() for _ in order]
        kept_at = next((at for at in order if lengths[at] > 1 and data.draw(st.booleans())), None)
        kept = []
        if kept_at is not None:
            cut = data.draw(st.integers(1, lengths[kept_at] - 1))
            kept = [Kept(sequence=order.index(kept_at), rows=cut, slot=free.pop())]
        pieces = [whole[at][done[at] : done[at] + lengths[at]] for at in order]
        found = layer.step(pieces, len(alone), slots([slot[at] for at in order], write, kept))
        for at, out_TD, after in zip(order, found, write, strict=True):
            free += [slot[at]] if slot[at] != ZERO_SLOT else []
            got[at].append(out_TD)
            done[at], slot[at] = done[at] + lengths[at], after
        for one in kept:
            assert kept_at is not None
            rest_TD = pieces[one.sequence][one.rows :]
            [again_TD] = layer.step([rest_TD], 0, slots([one.slot], [SPARE_SLOT]))
            torch.testing.assert_close(again_TD, found[one.sequence][one.rows :], atol=EXACT, rtol=EXACT)
            free.append(one.slot)
    for parts, wanted_TD in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts), wanted_TD, atol=EXACT, rtol=EXACT)


def test_a_step_leaves_what_it_reads_and_others_as_they_are() -> None:
    layer = Layer(BY_HEAD)
    before = [part.clone() for part in layer.states]
    layer.step([rows(1, 1), rows(9, 2)], 1, slots([4, 5], [6, 7], [Kept(sequence=1, rows=4, slot=8)]))
    for part, was in zip(layer.states, before, strict=True):
        changed = [slot for slot in range(SLOTS + FIRST_SLOT) if not torch.equal(part[slot], was[slot])]
        assert changed == [6, 7, 8]


def test_strong_decay_does_not_overflow() -> None:
    """Over a chunk the sum of log decays passes what exp() holds, in both directions."""
    layer = Layer(BY_PART)
    layer.recurrence._decay_H = torch.full_like(layer.recurrence._decay_H, 50.0)
    layer.tensors[A_LOG] = torch.full_like(layer.tensors[A_LOG], 50.0).log()
    h_TD = rows(2 * CHUNK, 1)
    [out_TD] = layer.step([h_TD], 0, slots([ZERO_SLOT], [3]))
    torch.testing.assert_close(out_TD, layer.wanted(h_TD), atol=EXACT, rtol=EXACT)
