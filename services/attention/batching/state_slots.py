"""Owners of recurrent states: which slot holds the state of which sequence, and states that are kept. Pure Python.

A step reads the state that a sequence has and writes the one after it into another slot, so it can run again, and one
launched ahead can be dropped. The slot that it read is given back once the step is accounted for. A state after a full
block of tokens may be kept under the name of that block: the next prompt that begins alike starts from it. Slots with
kept states that no sequence holds are handed out again, the one used longest ago first.

Steps run in the order in which they are launched. So slots of a sequence that has ended go back at once, though a step
in flight may still write them: whoever gets them is in a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.attention.batching.slot_pool import SlotPool
from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.model.state_room import FIRST_SLOT, STATES_PER_SEQUENCE, ZERO_SLOT, Kept


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSlots:
    """Slots that each sequence of a step reads and writes, and states that are to be kept within its rows."""

    read: list[int]
    write: list[int]
    kept: list[Kept]


@dataclass(kw_only=True, slots=True)
class _Launched:
    """What one step writes of a sequence: its state, and states to keep, by the number of tokens before them."""

    plan: StepPlan
    slot: int
    kept: dict[int, int]


@dataclass(kw_only=True, slots=True)
class _Held:
    """Slots of a sequence. ``current`` None: it is at its start. ``launched``: of steps in flight, in order. ``kept``:
    of a step that is done. ``branch``: after so many tokens another prompt went on otherwise. ``newest``: the name of
    the last state that is kept of its answer."""

    current: int | None = None
    launched: list[_Launched] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    branch: int = 0
    newest: bytes | None = None


class StateSlots:
    """``slots`` slots for recurrent states. ``keeps``: whether states are kept for other prompts."""

    def __init__(self, slots: int, block_size: int, *, keeps: bool) -> None:
        self.slots, self._block_size, self._keeps = slots, block_size, keeps
        self._pool = SlotPool(slots)
        self._held: dict[SequenceState, _Held] = {}

    @property
    def used(self) -> int:
        """Slots that sequences hold."""
        return self.slots - self._pool.available

    @property
    def kept(self) -> int:
        """Slots with states that no sequence holds and that prompts may start from."""
        return self._pool.cached

    def longest(self, state: SequenceState, names: Sequence[bytes], blocks: int) -> int:
        """Return after how many of the first ``blocks`` blocks of ``state``, whose keys and values are cached, a state
        is kept. Where the last of them has none, ``state`` is going to keep one."""
        found = next((count for count in range(blocks, 0, -1) if self._pool.find(names[count - 1]) is not None), 0)
        if found < blocks:
            self._of(state).branch = blocks * self._block_size
        return found

    def start(self, state: SequenceState, name: bytes) -> None:
        """Let ``state`` start from the state kept under ``name``, which :meth:`longest` found."""
        slot = self._pool.find(name)
        assert slot is not None, "no slot was taken since"
        self._pool.hold(slot)
        self._of(state).current = slot

    def launch(self, plan: StepPlan) -> StepSlots:
        """Return the slots of the sequences of ``plan``, which is launched now."""
        slots = StepSlots(read=[], write=[], kept=[])
        pieces: list[Piece | None] = [*(None for _ in plan.decodes), *plan.pieces]
        for number, (state, piece) in enumerate(zip(plan.states, pieces, strict=True)):
            held = self._of(state)
            before = held.launched[-1].slot if held.launched else held.current
            cuts = [] if piece is None else self._cuts(held, piece)
            launched = _Launched(plan=plan, slot=self._pool.take(), kept={cut: self._pool.take() for cut in cuts})
            held.launched.append(launched)
            slots.read.append(ZERO_SLOT if before is None else before + FIRST_SLOT)
            slots.write.append(launched.slot + FIRST_SLOT)
            for cut, slot in launched.kept.items():
                assert piece is not None
                slots.kept.append(Kept(sequence=number, rows=cut - piece.start, slot=slot + FIRST_SLOT))
        return slots

    def _cuts(self, held: _Held, piece: Piece) -> list[int]:
        """Return after how many tokens of the sequence, within ``piece``, a state is to be kept. Only as many are in
        flight as leave each sequence the other slots that it may need."""
        wanted = {held.branch}
        if piece.end == len(piece.state.token_ids):
            wanted.add(piece.end // self._block_size * self._block_size)
        under_way = sum(len(step.kept) for each in self._held.values() for step in each.launched)
        room = self.slots // STATES_PER_SEQUENCE - under_way if self._keeps else 0
        return sorted(cut for cut in wanted if piece.start < cut < piece.end)[: max(0, room)]

    def retract(self, plan: StepPlan) -> None:
        """Drop what ``plan`` wrote, if it was the last to be launched."""
        for state in plan.states:
            held = self._held.get(state)
            if held is not None and held.launched and held.launched[-1].plan is plan:
                self._drop(held.launched.pop())

    def complete(self, plan: StepPlan) -> None:
        """Note that the sequences of ``plan``, which may have run one by one, have the states that it wrote."""
        for state in plan.states:
            held = self._held.get(state)
            if held is not None and held.launched:
                done = held.launched.pop(0)
                if held.current is not None:
                    self._pool.release(held.current)
                held.current, held.kept = done.slot, done.kept

    def publish(self, state: SequenceState, names: Sequence[bytes]) -> None:
        """Keep the states of ``state`` after full blocks, which have ``names``. Of an answer only the last is kept."""
        held = self._held.get(state)
        if held is None or not self._keeps:
            return
        for tokens, slot in held.kept.items():
            self._pool.name(slot, names[tokens // self._block_size - 1])
            self._pool.release(slot)
        held.kept = {}
        if held.current is None or not state.computed or state.computed % self._block_size:
            return
        name = names[state.computed // self._block_size - 1]
        self._pool.name(held.current, name)
        if not state.prefilling:
            if held.newest is not None:
                self._pool.forget(held.newest)
            held.newest = name

    def end(self, state: SequenceState) -> None:
        """Give back what ``state`` holds: it has ended, or is going to be computed again."""
        held = self._held.pop(state, None)
        if held is None:
            return
        for step in held.launched:
            self._drop(step)
        for slot in held.kept.values():
            self._pool.release(slot)
        if held.current is not None:
            self._pool.release(held.current)

    def _drop(self, launched: _Launched) -> None:
        for slot in (launched.slot, *launched.kept.values()):
            self._pool.release(slot)

    def _of(self, state: SequenceState) -> _Held:
        return self._held.setdefault(state, _Held())
