"""What is drafted, for which sequences, and when: lookup, gate and plan, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from testkit.models.engines import ask
from torch import Tensor

from services.attention.batching.blocks import BlockPool
from services.attention.batching.manager import BatchManager
from services.attention.sequences.plan import BatchLimits, Outcome, Piece, StepPlan
from services.attention.sequences.sequence import SequenceState, open_sequence
from services.attention.speculation.drafting import Drafting
from services.attention.speculation.gate import BUDGET, NONE, TRIAL_STEPS, UNUSUAL_STEPS, Amount, Gate
from services.attention.speculation.ngram import NgramIndex, NgramSpeculator
from services.attention.speculation.speculator import Chains, OneByOne, Wanted
from services.attention.speculation.woken import WokenExperts
from services.config.speculation import SpeculativeConfig


def _state(tokens: Sequence[int]) -> SequenceState:
    return open_sequence(ask("r", tokens, max_tokens=50), 1, ())


def _speculator(shortest: int = 2, longest: int = 4) -> NgramSpeculator:
    return NgramSpeculator(SpeculativeConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest))


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 3, [3, 4, 9]),
        ([1, 2, 3, 4, 9, 1, 2], 1, [3]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the latest place
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, [7]),  # the place that agrees in more tokens
        ([1, 2, 3, 1], 3, []),  # one token is too few
        ([4, 1, 1, 1], 4, [1, 1, 1, 1]),  # the place reaches the end
        ([8, 1, 2, 3, 1, 2, 3], 5, [1, 2, 3, 1, 2]),
        ([3], 4, []),
    ],
)
def test_what_followed_the_same_tokens_is_drafted(tokens: list[int], most: int, drafts: list[int]) -> None:
    assert list(_speculator().drafts(_state(tokens), most)) == drafts


def test_an_index_that_grows_finds_what_one_of_the_whole_finds() -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(3) for _ in range(300)]
    growing = NgramIndex(2, 5)
    for end in range(2, len(tokens) + 1):
        whole = NgramIndex(2, 5)
        assert growing.follow(tokens[:end])
        assert whole.follow(tokens[:end])
        places = growing.places(tokens[:end])
        assert places == whole.places(tokens[:end])
        for place in places:
            assert tokens[place - 2 : place] == tokens[end - 2 : end]
            assert place < end


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    state, speculator = _state([*range(3000), 1, 2]), _speculator()
    found = [list(speculator.drafts(state, 2)) for _ in range(4)]
    assert found == [[], [], [3, 4], [3, 4]]


def test_an_ended_sequence_leaves_no_index() -> None:
    state, speculator = _state([1, 2, 1, 2]), _speculator()
    speculator.drafts(state, 1)
    assert speculator._indices
    speculator.forget(state)
    speculator.forget(state)
    assert not speculator._indices


class Costs:
    """Steps that take as long as their rows say, and accept each further draft with one probability."""

    def __init__(self, seconds: Callable[[int], float], accepted: float, sequences: int) -> None:
        self._seconds, self.accepted, self._sequences = seconds, accepted, sequences
        self._draw = random.Random(4)
        self.tokens, self.seconds = 0, 0.0

    def step(self, gate: Gate) -> None:
        depth = gate.amount(self._sequences).depth
        seconds = self._seconds(self._sequences * (1 + depth)) * self._draw.uniform(0.95, 1.05)
        tokens = sum(self._chain(depth) for _ in range(self._sequences))
        self.tokens += tokens
        self.seconds += seconds
        gate.note(self._sequences, tokens, seconds)

    def _chain(self, depth: int) -> int:
        taken = 1
        while taken <= depth and self._draw.random() < self.accepted:
            taken += 1
        return taken

    def gain(self, steps: int, gate: Gate) -> float:
        """Tokens a second over those without drafts."""
        self.tokens, self.seconds = 0, 0.0
        for _ in range(steps):
            self.step(gate)
        return self.tokens / self.seconds / (self._sequences / self._seconds(self._sequences))


EXPERTS: dict[str, Callable[[int], float]] = {
    "each row costs": lambda rows: 0.001 + 0.01 * rows,
    "rows wake experts": lambda rows: 0.002 + 0.01 * (1 - (1 - 8 / 128) ** rows) + 1e-5 * rows,
    "rows are free": lambda rows: 0.01 + 1e-6 * rows,
}


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("accepted", [0.0, 0.2, 0.6, 0.9])
@pytest.mark.parametrize("costs", EXPERTS)
def test_drafts_never_cost_a_twentieth_of_the_throughput(costs: str, accepted: float, sequences: int) -> None:
    gain = Costs(EXPERTS[costs], accepted, sequences).gain(3000, Gate(4))
    assert gain >= 0.95


def test_drafts_gain_where_they_are_accepted_and_rows_are_cheap() -> None:
    assert Costs(EXPERTS["rows are free"], 0.9, 4).gain(2000, Gate(4)) > 3.2


def test_the_length_follows_the_acceptance() -> None:
    gate = Gate(8)
    costs = Costs(EXPERTS["each row costs"], 0.95, 1)
    lengths = []
    for accepted in (0.95, 0.0, 0.95):
        costs.accepted = accepted
        costs.gain(4000, gate)
        lengths.append(gate._of(1).best.depth)
    assert lengths[1] == 0, "drafts that are rejected are left out"
    assert costs._seconds(9) > 5 * costs._seconds(1), "each row costs as much as the first"


def test_the_gate_opens_again_when_drafts_come_to_be_accepted() -> None:
    gate, costs = Gate(4), Costs(EXPERTS["rows are free"], 0.0, 2)
    slow = Costs(EXPERTS["each row costs"], 0.0, 2)
    slow.gain(500, gate)
    assert gate._of(2).best.depth == 0
    costs.accepted = 0.9
    assert costs.gain(6000, gate) > 1.5
    assert gate._of(2).best.depth > 0


def test_a_worker_that_stood_still_does_not_put_trials_off() -> None:
    """A step of 60 s is as a slow one: 2 % of the time must not be 50 minutes."""
    gate, seconds = Gate(4), 0.0
    for number in range(2000):
        gain = 4 if number > 100 else 0
        took = 0.02 * (1 + 0.1 * gate.amount(4).depth)
        seconds += took
        gate.note(4, 4 + gain * gate.amount(4).depth, took + (60.0 if number == 5 else 0.0))
    assert gate._of(4).best.depth == 4
    assert seconds < 120


def test_a_size_of_batch_that_is_new_begins_with_what_is_best_for_the_nearest() -> None:
    gate = Gate(4)
    Costs(EXPERTS["each row costs"], 0.0, 2).gain(500, gate)
    assert [gate.amount(sequences).depth for sequences in (1, 4, 200)] == [0, 0, 0]
    Costs(EXPERTS["rows are free"], 0.9, 200).gain(500, gate)
    best = gate._of(200).best.depth
    assert best > 0
    assert [gate.amount(sequences).depth for sequences in (8, 100, 1000)] == [0, best, best]


def test_a_disturbed_step_does_not_close_the_gate() -> None:
    gate, costs = Gate(4), Costs(EXPERTS["rows are free"], 0.9, 1)
    costs.gain(TRIAL_STEPS + 2 * UNUSUAL_STEPS + TRIAL_STEPS + 20, gate)
    best = gate._of(1).best
    assert best.depth > 0
    gate.note(1, 1, 5.0)
    for _ in range(UNUSUAL_STEPS + TRIAL_STEPS + 2):
        costs.step(gate)
        assert gate._of(1).best == best


def test_trials_wait_until_they_are_paid_for() -> None:
    """After a trial that was slower than usual, the share of lost time is at most the budget before the next one."""
    gate, costs = Gate(1), Costs(EXPERTS["each row costs"], 0.0, 8)
    tried = []
    for step in range(4000):
        if gate._of(8).tried == Amount(1, 1):
            tried.append(step)
        costs.step(gate)
    assert tried, "it is tried again"
    assert len(tried) / 4000 < 2 * BUDGET


class Everything(OneByOne):
    """Drafts as many sevens as it may."""

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        return [7] * most if state.blocks else []

    def chains(self, state: SequenceState, most: int, count: int) -> Sequence[Sequence[int]]:
        return [[7] * most, *([first] * most for first in range(8, 7 + count))] if state.blocks else []

    def forget(self, state: SequenceState) -> None:
        pass


def _manager(*, blocks: int = 100, seqs: int = 8, tokens: int = 64) -> BatchManager:
    limits = BatchLimits(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=64, vocab_size=97, eos_token_ids=()
    )
    pool = BlockPool(blocks, 4)
    return BatchManager(limits, pool, lambda: 0, drafting=Drafting(Everything(), Gate(4), pool))


def _after_prompts(manager: BatchManager) -> StepPlan:
    """Take the first token of all prompts, then plan."""
    plan = manager.plan()
    manager.complete(plan, [Outcome(token_id=1)] * plan.sequences)
    return manager.plan()


@pytest.mark.parametrize(
    ("sequences", "limits", "lengths"),
    [
        (2, {}, [5, 3]),  # six rows that no sequence uses
        (2, {"tokens": 5}, [4]),  # within the tokens of a step
        (1, {"seqs": 1}, []),
        (1, {"blocks": 2}, [2]),  # the one that is left is for the sequence to grow
        (2, {"blocks": 4}, [2, 2]),
        (2, {"blocks": 5, "seqs": 64}, [5, 2]),
    ],
)
def test_drafts_take_what_is_left(sequences: int, limits: dict[str, int], lengths: list[int]) -> None:
    manager = _manager(**limits)
    for number in range(sequences):
        manager.add(ask(f"r{number}", [1, 2], max_tokens=6))
    plan = _after_prompts(manager)
    assert [chain.length for chain in plan.chains] == lengths
    assert len(plan.decodes) == sequences - len(lengths)


def test_no_draft_is_beyond_the_end() -> None:
    manager = _manager()
    manager.add(ask("r", [1, 2], max_tokens=4))
    plan = _after_prompts(manager)
    assert [chain.drafts for chain in plan.chains] == [(7, 7)], "three tokens are wanted, one of them without a draft"


def test_chains_of_a_sequence_grow_and_shrink_with_what_is_accepted() -> None:
    manager = _manager()
    drafting = manager._drafting
    assert drafting is not None
    manager.add(ask("r", [1, 2], max_tokens=60))
    plan, lengths = _after_prompts(manager), []
    for accepted in (0, 1, 2, 1, 0):
        [chain] = plan.chains
        lengths.append(len(chain.drafts))
        drawn = [Outcome(token_id=7)] * accepted + [Outcome(token_id=8)] * (chain.length - accepted)
        outcome = Outcome.verified(drawn, chain.drafts)
        assert len(outcome.further) == accepted
        drafting.note(plan, [outcome], 0.01)
        manager.complete(plan, [outcome])
        plan = manager.plan()
    assert lengths == [4, 1, 2, 4, 2]


def _stepped(drafting: Drafting, plan: StepPlan, seconds: float) -> StepPlan:
    """Note a step in which every draft was rejected, and return what is planned after it."""
    outcomes = [Outcome(token_id=1)] * plan.sequences
    drafting.note(plan, outcomes, seconds)
    return drafting.extend(StepPlan(decodes=tuple(plan.states)), 64)


def _sequences(count: int) -> list[SequenceState]:
    states = [_state([1, 2, 3]) for _ in range(count)]
    for state in states:
        state.blocks = [0, 1, 2]
    return states


def test_beside_prompts_nothing_is_drafted_until_it_has_been_shown_to_gain() -> None:
    """The gate learns from steps without prompts alone: a server that always has some would never know."""
    gate, pool = Gate(1), BlockPool(16, 4)
    drafting, states = Drafting(Everything(), gate, pool), _sequences(2)
    prompts = (Piece.of(_state([5, 6, 7]), 9),)
    beside = StepPlan(decodes=tuple(states), prompts=prompts)
    assert drafting.extend(beside, 64) is beside
    assert not drafting.expects(beside, 64)
    costs = Costs(EXPERTS["rows are free"], 0.9, 2)
    costs.gain(40, gate)
    assert gate._of(2).best.depth == 1
    assert len(drafting.extend(beside, 64).chains) == 2


def test_steps_that_drafts_do_not_change_are_not_held_for_or_against_them() -> None:
    """Those without a draft while the gate is open; but one that waited for tokens only because of drafts counts."""
    gate = Gate(1)
    drafting = Drafting(_speculator(), gate, BlockPool(16, 4))
    plan = StepPlan(decodes=(_state([1, 2, 3]),))
    for _ in range(100):
        assert drafting.extend(plan, 64) is plan
        drafting.note(plan, [Outcome(token_id=1)], 1.0)
    assert not gate._of(1).rates
    [state] = _sequences(1)
    state.token_ids[:] = [1, 2, 9, 1, 2]
    assert drafting.expects(StepPlan(decodes=(state,)), 64)
    for _ in range(UNUSUAL_STEPS + 1):
        assert drafting.expects(StepPlan(decodes=(state,)), 64)
        waited = drafting.extend(plan, 64)
        drafting.note(waited, [Outcome(token_id=1)], 1.0)
    assert len(gate._of(1).rates[Amount(1, 1)].seen) == 1
    assert drafting.expects(StepPlan(chains=(Piece.chain(state, [9]),)), 0), "what it accepts has to be known"


def test_the_gate_closes_where_every_draft_is_rejected() -> None:
    gate, states = Gate(1), _sequences(2)
    drafting = Drafting(Everything(), gate, BlockPool(16, 4))
    plan, rows = drafting.extend(StepPlan(decodes=tuple(states)), 64), list[int]()
    for _ in range(300):
        rows.append(plan.tokens)
        plan = _stepped(drafting, plan, 0.01 * plan.tokens)
    assert rows[0] == 4
    assert sum(rows[50:]) / 250 < 2.2


class Prompted(Everything):
    """Drafts twos, and reads prompts, each at a price; ``late`` as the test says."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.late, self.read, self.asked = clock, False, list[int](), list[int]()
        self.answer: list[int] | None = None

    def draft(self, wanted: Sequence[Wanted], prompts: Sequence[Piece] = ()) -> list[Chains]:
        self.read += [piece.length for piece in prompts]
        self.asked += [one.most for one in wanted]
        self._clock.now += 0.001 * len(wanted) + 0.01 * len(prompts)
        return [[[2] * one.most if self.answer is None else self.answer] for one in wanted]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Noted(Gate):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(4)
        self.noted, self.charged = list[float](), list[float]()

    def known_amount(self, sequences: int) -> Amount:
        return self.amount(sequences)

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        del sequences, tokens
        self.noted.append(seconds)

    def charge(self, sequences: int, seconds: float) -> None:
        del sequences
        self.charged.append(seconds)


def _prompted() -> tuple[Drafting, Prompted, Noted, BlockPool]:
    clock = Clock()
    speculator, gate, pool = Prompted(clock), Noted(), BlockPool(64, 4)
    return Drafting(speculator, gate, pool, timer=clock), speculator, gate, pool


def _noted(drafting: Drafting, plan: StepPlan, seconds: float) -> None:
    drafting.note(plan, [Outcome(token_id=1)] * plan.sequences, seconds)


def test_prompts_are_shown_where_their_sequences_will_probably_have_drafts() -> None:
    drafting, speculator, gate, _ = _prompted()
    off = open_sequence(ask("r", [5, 6], speculation="off"), 1, ())
    plan = StepPlan(prompts=(Piece.of(_state([5, 6, 7]), 9), Piece.of(off, 9)))
    assert drafting.extend(plan, 64) is plan
    assert speculator.read == [3]
    gate._of(2).best = NONE
    assert drafting.extend(plan, 64) is plan
    assert speculator.read == [3]


def test_time_for_prompts_is_paid_by_the_steps_that_it_helps() -> None:
    """In parts that are no longer than a step: 12 ms for a prompt, 2 of them for drafts beside it."""
    drafting, _, gate, _ = _prompted()
    states = _sequences(2)
    mixed = drafting.extend(StepPlan(decodes=tuple(states), prompts=(Piece.of(_state(range(8)), 9),)), 64)
    assert [len(chain.drafts) for chain in mixed.chains] == [4, 4]
    _noted(drafting, mixed, 0.05)
    assert gate.noted == [], "steps with prompts are no measure"
    for _ in range(3):
        _noted(drafting, drafting.extend(StepPlan(decodes=tuple(states)), 64), 0.005)
    assert gate.noted == pytest.approx([0.01, 0.006, 0.005])


def test_time_in_which_a_speculator_catches_up_is_charged_and_no_measure() -> None:
    drafting, speculator, gate, _ = _prompted()
    states = _sequences(2)
    speculator.late = True
    _noted(drafting, drafting.extend(StepPlan(decodes=tuple(states)), 64), 0.3)
    assert (gate.noted, gate.charged) == ([], pytest.approx([0.002]))
    speculator.late = False
    _noted(drafting, drafting.extend(StepPlan(decodes=tuple(states)), 64), 0.01)
    assert gate.noted == pytest.approx([0.01])


def test_times_of_drafting_and_of_verifying_are_kept_apart() -> None:
    drafting, _, _, _ = _prompted()
    _noted(drafting, drafting.extend(StepPlan(decodes=tuple(_sequences(3))), 64), 0.01)
    assert list(drafting.draftings) == pytest.approx([0.003])
    assert list(drafting.verifications) == pytest.approx([0.007])


def test_blocks_for_drafts_that_do_not_come_are_given_back() -> None:
    """And none of those that the sequence had before."""
    drafting, speculator, _, pool = _prompted()
    state = _state([1, 2, 3])
    state.blocks = pool.take((), 1)
    plan = StepPlan(decodes=(state,))
    for answer, blocks in (([], 1), ([2], 1), ([2, 2], 2), ([], 2)):
        speculator.answer = answer
        extended = drafting.extend(plan, 64)
        assert (extended is plan) == (not answer)
        assert (len(state.blocks), pool.used) == (blocks, blocks)
    assert speculator.asked == [4] * 4


def test_steps_that_say_nothing_are_paid_for_like_the_others() -> None:
    """A size of batch begins with six steps that take 0.02 s longer than without drafts, two of which say nothing."""
    gate, steps = Gate(1), list[Amount]()
    while not gate._of(4).judged:
        steps.append(gate.amount(4))
        gate.note(4, 4, 0.03 if steps[-1].depth else 0.01)
    assert steps.count(Amount(1, 1)) == 6
    assert gate._of(4).best == NONE
    assert gate._of(4).pause_s == pytest.approx(6 * 0.02 / BUDGET)


def test_what_a_trial_cost_beside_its_steps_is_paid_for() -> None:
    """After catching up for 0.5 s nothing is tried for 25 s more."""
    pauses = []
    for charged in (0.0, 0.5):
        gate, costs = Gate(1), Costs(EXPERTS["each row costs"], 0.0, 8)
        while gate._of(8).tried is None:
            costs.step(gate)
        gate.charge(8, charged)
        while gate._of(8).tried is not None:
            costs.step(gate)
        pauses.append(gate._of(8).pause_s)
    assert pauses[1] - pauses[0] == pytest.approx(0.5 / BUDGET)


class Shown:
    """A link that chooses experts as the test says."""

    on_dispatch: Callable[[int, Tensor], None] | None = None

    def step(self, *layers: list[list[int]]) -> None:
        for layer, ids in enumerate(layers):
            if self.on_dispatch is not None:
                self.on_dispatch(layer, torch.tensor(ids))


def test_experts_that_drafts_alone_wake_are_counted_in_one_step_of_some() -> None:
    """A decode, a chain of two drafts, and a prompt of two tokens, whose second one is padding."""
    link = Shown()
    woken = WokenExperts(link, every=2)
    one, other = _sequences(2)
    plan = StepPlan(decodes=(one,), chains=(Piece.chain(other, [7, 8]),), prompts=(Piece.of(_state([1, 2]), 9),))
    for counted in (True, False, True):
        woken.watch(plan)
        assert (link.on_dispatch is not None) == counted
        link.step([[0, 1], [1, 2], [2, 3], [4, 3], [5, 0], [-1, -1]], [[0, 1], [0, 1], [0, 1], [1, 0], [0, 1], [-1, 6]])
        woken.count()
    assert (woken.hit, woken.by_drafts) == (2 * (6 + 3), 2 * 2)
    assert link.on_dispatch is None
    woken.watch(plan)
    woken.watch(plan)
    link.step([[0, 1], [1, 2]])  # one of two micro-batches
    woken.count()
    assert woken.hit == 18
    woken.watch(plan)
    woken.watch(plan)
    woken.watch(StepPlan(decodes=(one,)))
    assert link.on_dispatch is None, "the step failed, and the next one has no drafts"
