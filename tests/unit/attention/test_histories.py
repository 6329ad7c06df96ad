"""Tokens before a draw, found on the device: edits by them against edits from the whole list, whatever came before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from testkit.models.edited import edited
from torch.utils._python_dispatch import TorchDispatchMode

from services.attention.batching.blocks import BlockPool
from services.attention.kv_cache import KVCache
from services.attention.sampling import histories, penalties
from services.attention.sampling.edits import Edits
from services.attention.sampling.histories import Histories, History
from services.attention.sequences.plan import StepPlan
from services.attention.sequences.sequence import SequenceState, open_sequence
from services.messages import GenerateRequest, SamplingParams

CPU = torch.device("cpu")
V, BLOCKS = 13, 24
tokens = st.integers(0, V - 1)
asked = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.3, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.1, -0.7]),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
        "min_tokens": st.sampled_from([0, 3, 100]),
        "stop_token_ids": st.sampled_from([(), (0, 5), (1, V + 3)]),
    }
)


@pytest.fixture(autouse=True)
def _scribbled() -> Iterator[None]:
    """``torch.empty`` gives no zeros."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def cache(blocks: int, block_size: int) -> KVCache:
    """Without layers, and with tokens of others in its slots."""
    spec: Any = SimpleNamespace(layers=(), recurrent_layers=(), kv_shape=(2, 1, 1), kv_bytes=lambda _: 0)
    kv = KVCache(spec, num_blocks=blocks, block_size=block_size, dtype=torch.float32, device=CPU)
    kv.token_ids_S.random_(V)
    return kv


def sequence(known: Sequence[int], prompt_len: int, **sampling: Any) -> SequenceState:
    request = GenerateRequest(
        id="r", attempt=1, token_ids=list(known), prompt_len=prompt_len, deadline_ms=0, priority=0, tenant="",
        reply_to="", sampling=SamplingParams(**{"max_tokens": 99, "ignore_eos": True} | sampling),
    )  # fmt: skip
    return open_sequence(request, 0, ())


class Lives(RuleBasedStateMachine):
    """Sequences that come, are preempted, come back and go; steps read at once, launched ahead, and given up."""

    block_size = 3

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.pool = cache(BLOCKS, self.block_size), BlockPool(BLOCKS, self.block_size)
        self.histories, self.edits = Histories(self.kv), Edits(V, CPU)
        self.running: list[SequenceState] = []
        self.waiting: list[SequenceState] = []
        self.step = 0

    @rule(prompt=st.lists(tokens, min_size=1, max_size=9), delivered=st.lists(tokens, max_size=4), asked=asked)
    def arrive(self, prompt: list[int], delivered: list[int], asked: dict[str, Any]) -> None:
        self.waiting.append(sequence([*prompt, *delivered], len(prompt), **asked))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        state = self.waiting[0]
        needed = self.pool.blocks_for(len(state.token_ids) + 1)
        if self.pool.available < needed:
            return
        self.waiting.pop(0)
        state.blocks = self.pool.take((), needed)
        self._write(state, range(len(state.token_ids)))
        self.running.insert(data.draw(st.integers(0, len(self.running))), state)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        state = self._leave(data)
        self.waiting.insert(0, state)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._leave(data)

    @rule(data=st.data(), ahead=st.sampled_from(["not", "read", "given up"]))
    def decode(self, data: st.DataObject, ahead: str) -> None:
        """A step, and one after it that is launched before it is read, or not."""
        self._make_room()
        for state in self.running:
            self._write(state, [len(state.token_ids) - 1])
        plan = StepPlan(decodes=tuple(self.running))
        before = [list(state.token_ids) for state in plan.decodes]
        history = self.histories.of(plan)
        self._check(plan, history, before, 0)
        drawn = data.draw(st.lists(tokens, min_size=len(before), max_size=len(before)))
        if ahead != "not":
            for state, token in zip(plan.decodes, drawn, strict=True):
                self._write_token(state, len(state.token_ids), token)
            after = [[*known, token] for known, token in zip(before, drawn, strict=True)]
            self._check(plan, self.histories.of(plan), after, len(after))
            self._check(plan, history, before, 0)  # as a draw that has to be repeated
        if ahead == "given up":
            drawn = [(token + 1) % V for token in drawn]
        for state, token in zip(plan.decodes, drawn, strict=True):
            state.token_ids.append(token)

    def _leave(self, data: st.DataObject) -> SequenceState:
        state = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(state.blocks)
        state.blocks = []
        return state

    def _make_room(self) -> None:
        """For the last token and the one after it; the last of the running give way."""
        for state in list(self.running):
            while state in self.running and len(state.token_ids) + 1 > len(state.blocks) * self.block_size:
                if self.pool.available:
                    state.blocks += self.pool.take((), 1)
                    continue
                victim = self.running.pop()
                self.pool.release(victim.blocks)
                victim.blocks = []

    def _write(self, state: SequenceState, positions: Sequence[int]) -> None:
        for position in positions:
            self._write_token(state, position, state.token_ids[position])

    def _write_token(self, state: SequenceState, position: int, token: int) -> None:
        slot = state.blocks[position // self.block_size] * self.block_size + position % self.block_size
        self.kv.write_tokens(torch.tensor([slot]), torch.tensor([token]))

    def _check(self, plan: StepPlan, history: History | None, known: list[list[int]], ahead: int) -> None:
        self.step += 1
        rows = [state.row for state in plan.decodes]
        logits_RV = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(self.step)) * 3
        found = self.edits.of(logits_RV, rows, history, ahead)
        for number, (row, before) in enumerate(zip(rows, known, strict=True)):
            wanted_V = edited(logits_RV[number].numpy(), row, before)
            assert found[number].numpy().tobytes() == wanted_V.tobytes(), (row.params, before)


class LivesInWideBlocks(Lives):
    block_size = 8


class LivesInSmallParts(Lives):
    """Rows that are edited one or a few at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(penalties, "MAX_TOKENS_OF_CPU", 12)
        self._patch.setattr(penalties, "MAX_COUNTS", 2 * V)
        self._patch.setattr(histories, "_SLACK", 1)

    def teardown(self) -> None:
        self._patch.undo()


for machine in (Lives, LivesInWideBlocks, LivesInSmallParts):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestLives, TestLivesInWideBlocks, TestLivesInSmallParts = (
    machine.TestCase for machine in (Lives, LivesInWideBlocks, LivesInSmallParts)
)


class Closed(list[int]):
    """Tokens that the host may count and not read."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the host goes through all tokens of a row")

    def __getitem__(self, _at: Any) -> Any:
        raise AssertionError("the host reads tokens of a row")


class Counted(TorchDispatchMode):
    """What is launched, and how many numbers are uploaded for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched, self.uploaded = 0, 0
        for module in (histories, penalties):
            patch.setattr(module, "upload", self._upload)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launched += 1
        return func(*args, **(kwargs or {}))

    def _upload(self, values: Any, device: torch.device) -> Any:
        self.uploaded += values.size
        return torch.from_numpy(values).to(device)


def decoding(rows: int, context: int, **asked: Any) -> tuple[KVCache, list[SequenceState]]:
    """Run their first step, in which their blocks are uploaded."""
    draw, most = np.random.default_rng(rows + context), context // 16 + 2
    kv, blocks_RM = cache(rows * most, 16), draw.permutation(rows * most).reshape(rows, most)
    states = []
    for row in range(rows):
        known = draw.integers(V, size=context)
        states.append(sequence(known.tolist(), context // 2, **asked))
        states[-1].blocks = blocks_RM[row, : context // 16 + 1].tolist()
        slots = (blocks_RM[row][:, None] * 16 + np.arange(16)).reshape(-1)[:context]
        kv.write_tokens(torch.from_numpy(slots), torch.from_numpy(known))
    return kv, states


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": dict.fromkeys(range(V), 1.0),
    "min_tokens": 10**6,
    "stop_token_ids": tuple(range(5)),
}


def test_the_host_does_the_same_for_two_rows_and_for_many_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: launches are the same, and a few numbers for each row are uploaded."""
    monkeypatch.setattr(penalties, "MAX_TOKENS_OF_CPU", penalties.MAX_TOKENS)
    found: dict[tuple[int, int], tuple[int, float]] = {}
    for rows, context in ((2, 64), (64, 64), (64, 4096)):
        kv, states = decoding(rows, context, **EVERYTHING)
        tables, edits, logits_RV = Histories(kv), Edits(V, CPU), torch.randn(rows, V)
        plan = StepPlan(decodes=tuple(states))
        draw_rows = [state.row for state in states]
        edits.of(logits_RV, draw_rows, tables.of(plan), 0)
        for row in draw_rows:
            row.token_ids = Closed(row.token_ids)
        with Counted(monkeypatch) as counted:
            edits.of(logits_RV, draw_rows, tables.of(plan), 0)
        found[rows, context] = counted.launched, counted.uploaded / rows
    assert found[2, 64] == found[64, 64] == found[64, 4096]
    assert found[2, 64][1] < 150, "mostly which slots of its first and last block are the row's"


def test_another_block_is_uploaded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, states = decoding(8, 4096, **EVERYTHING)
    tables, plan = Histories(kv), StepPlan(decodes=tuple(states))
    tables.of(plan)
    with Counted(monkeypatch) as counted:
        tables.of(plan)
        assert counted.uploaded == 0
        states[3].blocks.append(7)
        tables.of(plan)
        assert counted.uploaded == 3, "row, column and block"
        tables.of(StepPlan(decodes=(*plan.decodes[4:], *plan.decodes[:3])))
        assert counted.uploaded == 3 + 2 * 7, "which rows moved, and where to"


def test_what_stands_for_rows_is_made_when_others_come() -> None:
    edits, rows = Edits(V, CPU), [state.row for state in decoding(3, 16, logit_bias={1: 2.0, 4: -1.0})[1]]
    logits_RV = torch.randn(3, V)
    first = edits.of(logits_RV, rows, None, 0)
    made = edits._biases._flat
    assert torch.equal(edits.of(logits_RV, rows, None, 0), first)
    assert edits._biases._flat is made
    fewer = edits.of(logits_RV[1:], rows[1:], None, 0)
    assert torch.equal(fewer, first[1:])
    edits.of(logits_RV, [decoding(1, 16)[1][0].row], None, 0)
    assert not edits._biases._made, "rows that have gone are kept, with all their tokens"
