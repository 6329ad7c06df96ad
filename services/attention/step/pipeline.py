"""The order of steps: each is planned, launched, read and accounted for.

With lookahead, step N+1 is launched while step N runs: the tokens that its decodes take in are on the device already.
The host then reads step N without stalling the device. Rows of sequences that ended in N are discarded
(:class:`services.attention.batching.blocks.HeldBack` keeps them harmless). If N failed or had to draw again, N+1 is
discarded and planned again. At most one step is launched ahead; two are in flight only within
:meth:`StepPipeline.step`.
Legend: B decoding sequences.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

from services.attention.batching.manager import BatchManager
from services.attention.batching.pace import Pace
from services.attention.sampling.histories import Histories
from services.attention.sampling.sampler import Sampler
from services.attention.sequences.plan import Outcome, StepPlan
from services.attention.speculation.drafting import Drafting
from services.attention.step.flatten import Flattener, moves
from services.attention.step.in_flight import InFlightStep, LastHidden
from services.attention.step.overlap import StepTime
from services.attention.step.runner import StepOutput, StepRunner
from services.errors import InternalError, LockstepBroken, RequestError
from services.model.transfer import Awaited, Mark, upload

logger = logging.getLogger(__name__)
Lookahead = Literal["off", "replayed", "all"]


class StepPipeline:
    """The steps of one engine, in one thread.

    Args:
        batch: plans steps and accounts for their outcomes.
        inputs: turns a plan into tensors.
        runner: runs the layers.
        lookahead: after which steps the next one is launched before they are read: none (``off``), those that ran as
            CUDA graphs (``replayed``), or ``all``. Where the host takes part in every layer, launching ahead delays the
            tokens of the step before and saves nothing.
        pace: learns how long steps take.
        drafting: learns from every step; None where nothing is drafted.
    """

    def __init__(
        self,
        batch: BatchManager,
        inputs: Flattener,
        runner: StepRunner[Any],
        sampler: Sampler,
        *,
        lookahead: Lookahead,
        pace: Pace | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._batch, self._inputs, self._runner, self._sampler = batch, inputs, runner, sampler
        self._model, self._kv = runner.model, runner.kv
        self._lookahead, self._pace, self._histories = lookahead, pace, Histories(runner.kv)
        self._drafting = drafting
        self._ahead: InFlightStep | None = None
        self._mark: Callable[[torch.device], Awaited] = Mark
        self._launched, self._last_read, self._goes_on = 0, 0.0, False
        self.steps, self.overlapped_steps, self.launched_ahead = 0, 0, 0
        """Totals since the start. A step that is launched ahead counts when it is read, for it may be discarded."""
        self.failures: Counter[str] = Counter()
        """Steps that failed since the start, by reason."""
        self.step_tokens, self.step_seconds, self.step_overlapped = 0, 0.0, False
        """Figures of the last step. The seconds of a step launched ahead begin where the step before it was read."""

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and is not read yet."""
        return self._ahead is not None

    def step(self) -> None:
        """Read the step in flight, or launch one and read that. Does nothing where there is nothing to compute."""
        step, self._ahead = self._ahead, None
        self.launched_ahead += step is not None
        if step is None and (plan := self._plan()).sequences:
            step = self._launch(plan)
        if step is not None:
            self._ahead = self._launch_next(step)
            self._read(step)

    def _plan(self) -> StepPlan:
        return self._batch.plan()

    def _launch(self, plan: StepPlan) -> InFlightStep:
        """Launch ``plan`` on the device. An error is kept in the step that is returned."""
        step = self._new(plan)
        with step.noting():
            step.inputs, step.history = self._inputs.of(plan), self._histories.of(plan)
            self._run(step)
        return step

    def _launch_next(self, step: InFlightStep) -> InFlightStep | None:
        """Launch the step after ``step`` before that is read. Returns None where it cannot be known yet or fails."""
        follows = step.replayed if self._lookahead == "replayed" else self._lookahead == "all"
        if not follows or step.error is not None:
            return None
        plan = self._batch.plan_ahead(step.plan, self._runner.replayed_rows if self._lookahead == "replayed" else None)
        if plan is None:
            return None
        ahead, last_hidden = self._new(plan), step.last_hidden
        with ahead.noting():
            tokens_B = step.tokens_for(plan)
            ahead.inputs, ahead.history = self._inputs.of(plan, tokens_B), self._histories.of(plan)
            with step.noting():  # the exchanges of ``step`` have to end before others begin
                self._finish(step)
            if step.error is None and step.last_hidden is last_hidden:
                self._run(ahead, ahead=len(plan.decodes))
        if ahead.last_hidden is None or ahead.error is not None:
            if ahead.error is not None and not isinstance(ahead.error, RequestError):
                logger.warning("a step launched ahead failed; planning it again", exc_info=ahead.error)
            self._discard(ahead)  # if the step fails again, its requests get the error
            return None
        return ahead

    def _run(self, step: InFlightStep, *, ahead: int = 0) -> None:
        """Launch all layers and the draws. Running a step again is safe: KV slots are overwritten, draws are keyed.

        Args:
            ahead: how many sequences, the first ones, have a token in the inputs that they do not know yet.
        """
        assert step.inputs is not None
        waited_s = self._runner.waited_s
        output = self._layers(step)
        step.split, step.replayed, step.sizes = output.split, output.replayed, output.sizes
        step.waited_s += self._runner.waited_s - waited_s
        try:
            step.last_hidden = self._draws(step, output.x_TD, ahead)
        except BaseException:
            self._runner.finish()
            raise
        step.computed = self._mark(self._model.device)

    def _layers(self, step: InFlightStep) -> StepOutput:
        assert step.inputs is not None
        return self._runner.run(step.inputs, step.number)

    def _draws(self, step: InFlightStep, x_TD: Tensor, ahead: int) -> LastHidden:
        assert step.inputs is not None
        return LastHidden.of(step.plan, step.inputs, x_TD, self._model, self._sampler, step.history, ahead)

    def _finish(self, step: InFlightStep) -> None:
        """Wait for the exchanges of ``step``, and run it again until its result is valid. The link bounds the time."""
        while not step.finished:
            step.finished = self._runner.finish()
            if not step.finished:
                self._run(step)

    def _read(self, step: InFlightStep) -> None:
        """Read ``step`` and account for it, while the device computes the step that was launched after it."""
        outcomes = self._outcomes(step)
        if step.redrawn:
            self._discard_ahead()
        now, before = time.perf_counter(), self._last_read
        seconds, self._last_read = now - max(step.began, before), now
        if step.error is None:
            timing = StepTime(seconds=seconds, waited_s=step.waited_s)
            self._runner.overlap.note(step.sizes, timing, split=step.split)
            if self._pace is not None and not step.plan.chains:
                decodes = len(step.plan.decodes)
                self._pace.note(decodes, step.plan.tokens - decodes, seconds)
            if self._drafting is not None:
                # With what the host did since the step before: steps launched ahead hide it, others do not.
                self._drafting.note(step.plan, outcomes, now - before if self._goes_on else seconds)
        self._account(step, outcomes)
        self._goes_on = self._batch.running > 0
        self.steps += 1
        self.overlapped_steps += step.split
        self.step_tokens, self.step_seconds, self.step_overlapped = step.plan.tokens, seconds, step.split

    def _account(self, step: InFlightStep, outcomes: Sequence[Outcome]) -> None:
        from_A, to_A = moves(step.plan, outcomes, self._kv.block_size)
        if len(from_A):
            device = self._model.device
            self._kv.move(upload(from_A, device), upload(to_A, device))
        if blocks := self._batch.complete(step.plan, outcomes):
            self._kv.zero(blocks)
        if self._drafting is not None:
            self._drafting.give_back()

    def _outcomes(self, step: InFlightStep) -> list[Outcome]:
        plan = step.plan
        try:
            self._finish(step)
            outcomes = step.outcomes(self._model)
            self.failures["not_finite"] += step.last_hidden is not None and step.last_hidden.broken
        except RequestError as error:
            self.failures["experts"] += 1
            return [Outcome(error=error)] * plan.sequences
        except LockstepBroken:
            raise  # no step can follow: this worker ends, and its requests go on elsewhere
        except Exception:
            self.failures["error"] += 1
            logger.exception("a step of %d sequences failed; running each sequence on its own", plan.sequences)
        else:
            return self._without_drafts(step, outcomes) if plan.chains else outcomes
        self._discard_ahead()
        if plan.chains and step.inputs is not None:  # a draft that is computed may be NaN, and nothing overwrites it
            self._kv.clear(step.inputs.slots_T)
        self._inputs.retract(plan)
        if plan.sequences == 1 and not plan.chains:
            return [Outcome(error=_step_failed())]
        return [outcome for alone in plan.one_by_one() for outcome in self._alone(alone)]

    def _without_drafts(self, step: InFlightStep, outcomes: list[Outcome]) -> list[Outcome]:
        """Compute chains again that failed, without their drafts: a row that is not finite breaks those before it."""
        assert step.last_hidden is not None
        if step.last_hidden.broken:
            self._kv.clear(step.last_hidden.broken_slots())
        for at, chain in enumerate(step.plan.chains, start=len(step.plan.decodes)):
            if outcomes[at].error is not None:
                [outcomes[at]] = self._alone(StepPlan(decodes=(chain.state,)))
        return outcomes

    def _alone(self, plan: StepPlan) -> list[Outcome]:
        ended = any(not state.blocks for state in plan.states)
        return [Outcome(error=_step_failed())] if ended else self._outcomes(self._launch(plan))

    def _discard_ahead(self) -> None:
        """Discard the step that was launched after the one being read, because its inputs are wrong."""
        step, self._ahead = self._ahead, None
        if step is not None:
            self._discard(step)

    def _discard(self, step: InFlightStep) -> None:
        """Undo the launch of ``step``. Keys and values that it wrote are zeroed, so that no NaN stays behind."""
        if step.last_hidden is not None and not step.finished:
            with suppress(RequestError):
                self._runner.finish()
        if step.inputs is not None:
            self._kv.clear(step.inputs.slots_T)
        self._batch.abandon(step.plan)

    def _new(self, plan: StepPlan) -> InFlightStep:
        self._launched += 1
        return InFlightStep(plan=plan, number=self._launched, began=time.perf_counter())


def _step_failed() -> RequestError:
    return InternalError("The step that computed this request failed.", hint="The worker's log has the cause.")
