"""Slots of recurrent states: none is lost or handed out twice, and a state is found only where it is what it is said to
be."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from testkit.models.engines import ask

from services.attention.batching.state_slots import StateSlots
from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState, open_sequence
from services.model.state_room import FIRST_SLOT, STATES_PER_SEQUENCE, ZERO_SLOT

BLOCK, SEQUENCES = 4, 3
Tokens = tuple[int, ...]


def opened(name: str, prompt: list[int]) -> SequenceState:
    return open_sequence(ask(name, prompt, 99), 1, ())


def names_of(state: SequenceState) -> list[bytes]:
    return state.extend_chain(BLOCK, len(state.token_ids) // BLOCK, "all")


class Slots(RuleBasedStateMachine):
    """A batch of sequences with prompts of few tokens, so that many begin alike. What a slot holds is the tokens that
    made it; a step is launched, and read before or after the next one, or dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = StateSlots(SEQUENCES * STATES_PER_SEQUENCE, BLOCK, keeps=True)
        self.content: dict[int, Tokens] = {ZERO_SLOT: ()}
        self.running: list[SequenceState] = []
        self.flight: list[tuple[StepPlan, dict[SequenceState, int]]] = []
        self.made = 0

    def after(self, state: SequenceState) -> int:
        """How many tokens are computed once all steps in flight are."""
        return next((ends[state] for _, ends in reversed(self.flight) if state in ends), state.computed)

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14))
    @precondition(lambda self: len(self.running) < SEQUENCES)
    def start(self, prompt: list[int]) -> None:
        self.made += 1
        state = opened(f"r{self.made}", prompt)
        names = state.extend_chain(BLOCK, (len(prompt) - 1) // BLOCK, "all")
        found = self.slots.longest(state, names, len(names))
        state.computed = found * BLOCK
        if found:
            self.slots.start(state, names[found - 1])
        state.blocks = [1]
        self.running.append(state)

    @rule(data=st.data())
    @precondition(lambda self: self.running and len(self.flight) < 2)
    def launch(self, data: st.DataObject) -> None:
        decodes, pieces, ends = [], [], {}
        for state in self.running:
            first = self.after(state)
            left = len(state.token_ids) - first
            if left < 1:
                continue
            length = data.draw(st.integers(0, left))
            if length == 1 and left == 1 and not state.prefilling:
                decodes.append(state)
            elif length:
                pieces.append(Piece.of(state, length, first))
            else:
                continue
            ends[state] = first + length
        plan = StepPlan(decodes=tuple(decodes), prompts=tuple(pieces))
        if not ends:
            return
        given = self.slots.launch(plan)
        written = given.write + [one.slot for one in given.kept]
        assert len(set(written)) == len(written)
        assert not set(written) & set(given.read)
        assert min(written) >= FIRST_SLOT
        for state, read, write in zip(plan.states, given.read, given.write, strict=True):
            assert self.content[read] == tuple(state.token_ids[: self.after(state)]), "it goes on from what it has"
            self.content[write] = tuple(state.token_ids[: ends[state]])
        for one in given.kept:
            state = plan.states[one.sequence]
            self.content[one.slot] = tuple(state.token_ids[: self.after(state) + one.rows])
        self.flight.append((plan, ends))

    @rule(token=st.integers(1, 2))
    @precondition(lambda self: self.flight)
    def complete(self, token: int) -> None:
        plan, ends = self.flight.pop(0)
        self.slots.complete(plan)
        for state in plan.states:
            if not state.blocks:
                continue
            state.computed = ends[state]
            self.slots.publish(state, names_of(state))
            state.prefilling = state.prefilling and state.computed < len(state.token_ids)
            if not self.flight and state.computed == len(state.token_ids):
                state.token_ids.append(token)

    @rule()
    @precondition(lambda self: self.flight)
    def drop(self) -> None:
        plan, _ = self.flight.pop()
        self.slots.retract(plan)

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def end(self, data: st.DataObject) -> None:
        state = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        state.blocks = []
        self.slots.end(state)
        if self.flight:  # what follows must not count on it
            self.flight = [
                (plan, {one: at for one, at in ends.items() if one is not state}) for plan, ends in self.flight
            ]

    @invariant()
    def every_slot_has_its_owners_and_no_others(self) -> None:
        owned = Counter[int]()
        for held in self.slots._held.values():
            owned.update([held.current] if held.current is not None else [])
            owned.update(held.kept.values())
            for step in held.launched:
                owned.update([step.slot, *step.kept.values()])
        blocks = self.slots._pool._blocks
        assert blocks._references == [owned[slot] for slot in range(self.slots.slots)]
        assert self.slots.used == len(owned) <= self.slots.slots

    @invariant()
    def names_find_the_states_after_their_tokens(self) -> None:
        for name, slot in self.slots._pool._blocks._block_of.items():
            tokens = self.content[slot + FIRST_SLOT]
            assert not len(tokens) % BLOCK
            assert opened("", [*tokens, 1]).extend_chain(BLOCK, len(tokens) // BLOCK, "all")[-1] == name


Slots.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlots = Slots.TestCase


def test_without_sharing_nothing_is_kept() -> None:
    slots, state = StateSlots(4, BLOCK, keeps=False), opened("r", [1] * 9)
    plan = StepPlan(prompts=(Piece.of(state, 9),))
    assert not slots.launch(plan).kept
    slots.complete(plan)
    state.computed = 8
    slots.publish(state, names_of(state))
    slots.end(state)
    assert (slots.used, slots.kept) == (0, 0)


def test_of_an_answer_only_the_last_state_is_kept() -> None:
    slots, state = StateSlots(8, BLOCK, keeps=True), opened("r", [1, 2, 3])
    state.prefilling = False
    for token in range(13):
        state.token_ids.append(token)
        plan = StepPlan(decodes=(state,))
        slots.launch(plan)
        slots.complete(plan)
        state.computed += 1
        slots.publish(state, names_of(state))
    slots.end(state)
    assert slots.kept == 1
    assert slots.longest(state, names_of(state), 4) == 3, "after twelve tokens"
