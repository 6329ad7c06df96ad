"""Drafts by a model: a first step takes in what it has not computed of the sequences, then each draft is a small step.

A draft is drawn as its target draws, with the key of its position, the penalties and the filters of the request: where
both models agree, sampled tokens agree, too. Tokens stay on the device from step to step; the host reads them once.

What a sequence has in the draft's cache follows from its tokens: those that were computed as known ones, and drafts
that were accepted; of another branch of a tree it has nothing. A sequence may lag behind, after steps without drafts or
a prompt that was launched ahead: the first step then takes in what is missing, as far as there is room.
Legend: B sequences with drafts, the longest chains first, T rows of a step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from services.attention.draft_model.coverage import Coverage
from services.attention.draft_model.next_rows import NextRows
from services.attention.kv_cache import KVCache
from services.attention.sampling.histories import Histories
from services.attention.sampling.sampler import Drawn, Sampler
from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.speculator import Chains, Wanted
from services.attention.step.cuda_graphs import StepGraphs
from services.attention.step.engine import EngineOptions
from services.attention.step.flatten import Flattener
from services.attention.step.overlap import OverlapPolicy
from services.attention.step.runner import StepRunner
from services.fabric.link import ExpertLink
from services.model.dense import DenseModel
from services.model.inputs import StepInputs
from services.model.transfer import Mark

LATE_TOKENS = 32
"""A sequence that lags by more has to be taken in first, and the time of that says nothing about drafts."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computing:
    """The model that drafts, and what it computes with."""

    model: DenseModel
    link: ExpertLink[Any]
    kv: KVCache
    graphs: StepGraphs[Any] | None


@dataclass(slots=True)
class _Kept:
    """A sequence in the draft's cache: ``computed`` leading tokens, and behind them ``guessed`` ones."""

    computed: int
    guessed: list[int] = field(default_factory=list)


class ModelSpeculator:
    """Drafts of one engine's sequences. The first failure ends it, and is counted in ``failures`` by its reason."""

    def __init__(self, parts: Computing, options: EngineOptions, failures: Counter[str]) -> None:
        model, kv = parts.model, parts.kv
        self._model, self._failures = model, failures
        self._runner = StepRunner(model, parts.link, kv, graphs=parts.graphs, overlap=OverlapPolicy("off"))
        self._inputs, self._histories = Flattener(kv.block_size, model.device), Histories(kv)
        self._sampler = Sampler(model.spec.vocab_size, model.device)
        self._coverage = Coverage(kv.block_size, prefix_cache=options.prefix_cache, scope=options.prefix_cache_scope)
        self._rows, self._block_size, self._steps = options.max_num_batched_tokens, kv.block_size, 0
        self._kept: dict[SequenceState, _Kept] = {}
        self.late = False

    def may(self, state: SequenceState) -> bool:
        del state
        return not self._failures

    def forget(self, state: SequenceState) -> None:
        self._kept.pop(state, None)

    def settle(self, state: SequenceState) -> None:
        if state in self._kept:
            self._computed(state)

    def draft(self, wanted: Sequence[Wanted], prompts: Sequence[Piece] = ()) -> list[Chains]:
        """Draft as :class:`services.attention.speculation.speculator.Speculator` says. Does not raise."""
        self.late, drafts = False, dict[SequenceState, Sequence[int]]()
        if not self._failures:
            try:
                drafts = self._drafts(wanted, prompts)
            except _NotFinite:
                self._end("not_finite", "the draft model gave NaN or infinity")
            except Exception:  # noqa: BLE001  requests go on without drafts, whatever it was
                self._end("error", "drafting raised")
        return [[drafts[one.state]] if one.state in drafts else [] for one in wanted]

    def _drafts(self, wanted: Sequence[Wanted], prompts: Sequence[Piece]) -> dict[SequenceState, Sequence[int]]:
        longest_first = sorted(wanted, key=lambda one: -one.most)
        pieces = self._pieces(longest_first, prompts)
        drawing = {piece.state for piece in pieces if piece.draws}
        ready = [one for one in longest_first if one.state in drawing]
        if not pieces:
            return {}
        for piece in pieces:
            self._coverage.writes(piece.state, piece.start, piece.end)
        inputs = self._inputs.of(StepPlan(prompts=tuple(pieces)))
        x_TD = self._forward(inputs)
        for piece in pieces:
            self._coverage.computed(piece.state, piece.start, piece.end)
            self._kept[piece.state].computed = piece.end
        drawn = self._chains(ready, x_TD[inputs.logits_rows_R]) if ready else []
        Mark(self._model.device).wait()  # where there are prompts alone, too: the time is to be that of the device
        return self._read(ready, drawn)

    def _pieces(self, wanted: Sequence[Wanted], prompts: Sequence[Piece]) -> list[Piece]:
        """Return what is missing of the sequences, as many rows as a step has; those that are complete draw."""
        asked = [(one.state, len(one.state.token_ids)) for one in wanted]
        asked += [(piece.state, piece.end) for piece in prompts]
        pieces, left = list[Piece](), self._rows
        for number, (state, end) in enumerate(asked):
            drafts = number < len(wanted)
            start = min(self._computed(state), end - drafts)  # what draws is computed again, if need be
            self.late |= drafts and end - start > LATE_TOKENS
            length = min(end - start, left)
            if length > 0:
                draws = drafts and length == end - start
                pieces.append(Piece(state=state, start=start, length=length, draws=draws, scored=range(0)))
                left -= length
        return pieces

    def _computed(self, state: SequenceState) -> int:
        """Return how many leading tokens of ``state`` the cache has: drafts, too, as far as they were accepted."""
        kept = self._kept.get(state)
        if kept is None:
            kept = self._kept[state] = _Kept(self._coverage.tokens(state))
        known = state.token_ids[kept.computed : kept.computed + len(kept.guessed)]
        right = next((at for at, token in enumerate(known) if token != kept.guessed[at]), len(known))
        if right:
            self._coverage.computed(state, kept.computed, kept.computed + right)
            kept.computed += right
        kept.guessed = []
        return kept.computed

    def _chains(self, ready: Sequence[Wanted], x_BD: Tensor) -> list[Drawn]:
        """Draw a token for each of ``ready``, then one more for those that want more, and so on. Does not wait."""
        states = [one.state for one in ready]
        for one in ready:
            known = len(one.state.token_ids)
            self._coverage.writes(one.state, known, known + one.most - 1)
        history = self._histories.of(StepPlan(decodes=tuple(states)))
        following = NextRows(states, self._block_size, self._model.device)
        drawn = list[Drawn]()
        for number in range(ready[0].most):
            if number:
                count = sum(one.most > number for one in ready)
                x_BD = self._forward(following.of(number - 1, drawn[-1].tokens_R[:count]))
            rows = [state.row.after(number) for state in states[: len(x_BD)]]
            drawn.append(self._sampler.draw(self._model.logits(x_BD), rows, history))
        return drawn

    def _read(self, ready: Sequence[Wanted], drawn: Sequence[Drawn]) -> dict[SequenceState, Sequence[int]]:
        """Return the drafts, and keep those that were computed. Raises _NotFinite."""
        tokens = [draw.host_R.tolist() for draw in drawn]
        drafts = dict[SequenceState, Sequence[int]]()
        for number, one in enumerate(ready):
            said = [of_all[number] for of_all in tokens[: one.most]]
            if min(said) < 0:
                raise _NotFinite
            self._kept[one.state].guessed = said[:-1]
            drafts[one.state] = said
        return drafts

    def _forward(self, inputs: StepInputs) -> Tensor:
        self._steps += 1
        output = self._runner.run(inputs, self._steps)
        assert self._runner.finish(), "links within a process are always valid"
        return output.x_TD

    def _end(self, reason: str, what: str) -> None:
        self._failures[reason] += 1
        self._kept.clear()
        log.warning("no more drafts from this worker: %s; answers go on without", what, exc_info=reason == "error")


class _NotFinite(Exception):
    """A draw from values that are not finite."""
