"""A step in flight: launched on the device and not yet read by the host. Its plan goes in, its outcomes come out.

While a step is in flight the engine may launch the next one (:mod:`services.attention.step.pipeline`).
Legend: T rows of a step, B decoding sequences, R rows whose logits are wanted, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from torch import Tensor

from services.attention.sampling.histories import History
from services.attention.sampling.logprobs import ScoreTable, TokenScores, joined
from services.attention.sampling.sampler import Drawn, Sampler, broken_logits
from services.attention.sequences.plan import Outcome, Piece, StepPlan
from services.errors import LockstepBroken
from services.model.dense import DenseModel
from services.model.inputs import StepInputs
from services.model.transfer import Awaited, download, upload

SCORED_ROWS = 64
"""Most prompt rows scored at a time: echoed log-probabilities need [rows, vocabulary] floats at once."""


@dataclass(kw_only=True, slots=True, eq=False)
class InFlightStep:
    """One step. ``number`` names its exchanges; times are in seconds of the host's clock."""

    plan: StepPlan
    number: int
    began: float
    inputs: StepInputs | None = None
    history: History | None = None
    sizes: Sequence[tuple[int, int]] = ()
    """(rows, length) of the step's sequences, if the overlap policy learns from it."""
    split: bool = False
    replayed: bool = False
    waited_s: float = 0.0
    last_hidden: LastHidden | None = None
    """None until the step is launched."""
    computed: Awaited | None = None
    """The point at which the device has computed the step."""
    finished: bool = False
    """Whether the step's exchanges have ended, with a valid result or in ``error``."""
    error: Exception | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep an error that is raised inside, until the step is read."""
        try:
            yield
        except LockstepBroken:
            raise
        except Exception as error:  # noqa: BLE001
            self.error, self.finished = error, True

    @property
    def redrawn(self) -> bool:
        """Whether reading the step changed its draws. A step that was launched after it then has wrong tokens."""
        return self.last_hidden is not None and self.last_hidden.redrawn

    def outcomes(self, model: DenseModel) -> list[Outcome]:
        """Return one outcome per sequence of the plan. Waits for the device. Raises the error that was kept, if any."""
        if self.error is not None:
            raise self.error
        assert self.last_hidden is not None
        assert self.computed is not None
        self.computed.wait()
        return self.last_hidden.outcomes(model)

    def tokens_for(self, plan: StepPlan) -> Tensor:
        """Return the tokens on the device that this step draws for the decodes of ``plan``, which follows it."""
        assert self.last_hidden is not None
        if not plan.decodes:
            return self.last_hidden.inputs.token_ids_T[:0]
        assert self.last_hidden.drawn is not None
        tokens_B = self.last_hidden.drawn.tokens_R
        if plan.decodes is self.plan.decodes and len(tokens_B) == len(plan.decodes):  # no prompt drew, cancelled or not
            return tokens_B
        row_of = {state: row for row, state in enumerate(self.plan.drawing)}
        return tokens_B[upload(np.array([row_of[state] for state in plan.decodes]), tokens_B.device)]


@dataclass(kw_only=True, slots=True, eq=False)
class LastHidden:
    """The rows after the last layer, with the tokens drawn and the prompts scored from them."""

    plan: StepPlan
    inputs: StepInputs
    drawn: Drawn | None
    scored_RD: Tensor
    """Rows that score prompts."""
    finite_T: Tensor
    redrawn: bool = field(init=False, default=False)
    """Whether :meth:`outcomes` had to draw again."""
    broken: bool = field(init=False, default=False)
    """Whether :meth:`outcomes` found values that are not finite."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        inputs: StepInputs,
        x_TD: Tensor,
        model: DenseModel,
        sampler: Sampler,
        history: History | None,
        ahead: int,
    ) -> LastHidden:
        """Draw without waiting for the device. ``history`` and ``ahead`` are those of :meth:`Sampler.draw`."""
        rows = plan.rows
        x_RD = x_TD[inputs.logits_rows_R] if plan.prompts else x_TD
        drawn = sampler.draw(model.logits(x_RD[: len(rows)]), rows, history, ahead=ahead) if rows else None
        finite_T = download(x_TD.isfinite().all(dim=-1))
        return cls(plan=plan, inputs=inputs, drawn=drawn, scored_RD=x_RD[len(rows) :], finite_T=finite_T)

    def outcomes(self, model: DenseModel) -> list[Outcome]:
        """Return one outcome per sequence of the plan. Only once the device has computed the step."""
        outcomes: list[Outcome] = []
        if self.drawn is not None:
            drawn = self.drawn.redrawn()
            self.redrawn = drawn is not self.drawn
            outcomes = drawn.outcomes()
        if self.plan.chains:
            outcomes = self._with_chains(outcomes)
        if self.plan.prompts:
            outcomes = self._with_prompts(outcomes, model)
        if bool(self.finite_T.all()):
            return outcomes
        self.broken = True
        healthy = _healthy(self.finite_T, self.inputs)
        return [o if fine else _broken() for o, fine in zip(outcomes, healthy, strict=True)]

    def broken_slots(self) -> Tensor:
        """Return the slots of rows that are not finite."""
        return self.inputs.slots_T[self.finite_T.logical_not().nonzero()[:, 0].to(self.inputs.slots_T.device)]

    def _with_chains(self, drawn: Sequence[Outcome]) -> list[Outcome]:
        """Return one outcome per decode and chain, made of ``drawn``, one per draw, and then those of prompts."""
        first = len(self.plan.decodes)
        outcomes = list(drawn[:first])
        for chain in self.plan.chains:
            outcomes.append(Outcome.verified(drawn[first : first + chain.length], chain.drafts, chain.tree))
            first += chain.length
        return outcomes + list(drawn[first:])

    def _with_prompts(self, drawn: Sequence[Outcome], model: DenseModel) -> list[Outcome]:
        """Return one outcome per sequence, made of ``drawn``, one per draw of prompts, and of rows that score them."""
        others = len(self.plan.decodes) + len(self.plan.chains)
        draws, scores = iter(drawn[others:]), _scores(self.scored_RD, self.plan.prompts, model)
        outcomes = list(drawn[:others])
        for piece in self.plan.prompts:
            outcome = next(draws) if piece.draws else Outcome()
            outcomes.append(_with_scores(outcome, next(scores), piece))
        return outcomes


def _scores(x_RD: Tensor, pieces: Sequence[Piece], model: DenseModel) -> Iterator[ScoreTable | None]:
    """Yield the log-probabilities of the prompt tokens that each of ``pieces`` scores. Waits for the device."""
    for width, alike in groupby(pieces, key=lambda piece: piece.state.request.sampling.prompt_logprobs or 0):
        group = list(alike)
        tokens = [piece.state.token_ids[position] for piece in group for position in piece.scored]
        table = _score(x_RD[: len(tokens)], tokens, width, model) if tokens else None
        x_RD = x_RD[len(tokens) :]
        first = 0
        for piece in group:
            rows = slice(first, first := first + len(piece.scored))
            yield table.part(rows) if table is not None and piece.scored else None


def _score(x_RD: Tensor, tokens: Sequence[int], width: int, model: DenseModel) -> ScoreTable:
    tables: list[ScoreTable] = []
    for start in range(0, len(tokens), SCORED_ROWS):
        logits_RV = model.logits(x_RD[start : start + SCORED_ROWS])
        tokens_R = upload(np.array(tokens[start : start + SCORED_ROWS]), logits_RV.device)
        tables.append(TokenScores(logits_RV, tokens_R, [width] * len(tokens_R)).wait().table())
    return joined(tables)


def _healthy(finite_T: Tensor, inputs: StepInputs) -> list[bool]:
    """Return whether all rows of each sequence are finite."""
    decodes = len(inputs.decodes or ())
    pieces = [bool(finite_T[rows.start : rows.start + rows.length].all()) for rows in inputs.sequences]
    healthy: list[bool] = finite_T[:decodes].tolist()
    return healthy + pieces


def _with_scores(outcome: Outcome, scores: ScoreTable | None, piece: Piece) -> Outcome:
    if scores is None or outcome.error is not None:
        return outcome
    if scores.broken:
        return _broken()
    return Outcome(token_id=outcome.token_id, logprob=outcome.logprob, scores=scores.message(piece.scored.start))


def _broken() -> Outcome:
    return Outcome(error=broken_logits())
