"""Steps one after the other: planned, launched, read, accounted for; and, with lookahead, the next one launched before.

A step that only decodes what the one before it draws for is launched while that is under way: its tokens are on the
device already. Meanwhile the host reads the earlier one, so the device does not wait for it. What the later
one computes for a sequence that has ended by then is dropped (:mod:`services.attention.batching.deferred_free` says why
that harms nobody). If the earlier step failed, or drew something else in the end, the later one is given up and planned
anew. At most one step is launched ahead, and two are under way only within :meth:`Stepper.step`.
Legend: B decoding sequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from services.attention.batching.manager import BatchManager
from services.attention.kv_cache import KVCache
from services.attention.sampling.histories import Histories
from services.attention.sampling.sampler import Sampler
from services.attention.sequences.plan import Outcome, StepPlan
from services.attention.step.flatten import Flattener
from services.attention.step.in_flight import Awaited, Flight, Top
from services.attention.step.overlap import OverlapPolicy, StepTime
from services.errors import InternalError, MeshBroken, RequestError
from services.model.dense import DenseModel
from services.model.inputs import StepInputs
from services.model.transfer import Mark

logger = logging.getLogger(__name__)
Lookahead = Literal["off", "replayed", "all"]


@dataclass(frozen=True, slots=True)
class Climbed:
    """``x_TD`` after the last layer; whether that took two micro-batches, and whether the host had but one launch.
    ``sizes``: of the sequences, where the overlap policy is to learn from the step."""

    x_TD: Tensor
    split: bool
    replayed: bool
    sizes: Sequence[tuple[int, int]] = ()


class Climb(Protocol):
    """From the rows of a step to those after the last layer."""

    def __call__(self, inputs: StepInputs, number: int) -> Climbed:
        """Where it raises, the step counts as settled. ``number`` names it."""
        ...


class Stepper:
    """Over the parts of an engine, in one thread.

    Args:
        settled: whether what ``climb`` returned is right, or to be made again. Asked once after each that returned,
            before the next; as :meth:`services.fabric.link.ExpertLink.settled` says.
        waited_s: for experts, since the start, by the host's clock.
        lookahead: launch steps ahead where that can be: after ``replayed`` ones, or after ``all``. Where the host takes
            part in every layer, launching ahead keeps the tokens of the step before back, and saves nothing.
    """

    def __init__(
        self,
        *,
        batch: BatchManager,
        inputs: Flattener,
        climb: Climb,
        settled: Callable[[], bool],
        model: DenseModel,
        waited_s: Callable[[], float],
        sampler: Sampler,
        kv: KVCache,
        overlap: OverlapPolicy,
        lookahead: Lookahead,
    ) -> None:
        self._batch, self._inputs, self._climb, self._settled = batch, inputs, climb, settled
        self._model, self._sampler, self._kv, self._overlap = model, sampler, kv, overlap
        self._waited_s, self._lookahead, self._histories = waited_s, lookahead, Histories(kv)
        self._ahead: Flight | None = None
        self._mark: Callable[[torch.device], Awaited] = Mark
        self._launched, self._landed = 0, 0.0
        self.steps, self.overlapped_steps, self.launched_ahead = 0, 0, 0
        """Since the start; one launched ahead counts when it is read, for it may be given up before."""
        self.step_tokens, self.step_seconds, self.step_overlapped = 0, 0.0, False
        """Of the last step. One launched ahead takes as long as it came after the one before."""

    @property
    def under_way(self) -> bool:
        """Whether a step was launched that was not read yet."""
        return self._ahead is not None

    def step(self) -> None:
        """Read a step: that which is under way, or one launched now. Nothing, where there is nothing to compute."""
        flight, self._ahead = self._ahead, None
        self.launched_ahead += flight is not None
        if flight is None and (plan := self._batch.plan()).sequences:
            flight = self._launch(plan)
        if flight is not None:
            self._ahead = self._follow(flight)
            self._land(flight)

    def _launch(self, plan: StepPlan) -> Flight:
        """Tell the device to compute ``plan``. What fails is noted."""
        flight = self._new(plan)
        with flight.noting():
            flight.inputs, flight.history = self._inputs.of(plan), self._histories.of(plan)
            self._fly(flight)
        return flight

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch what comes after ``flight``, before that is read, where it can be known and nothing fails."""
        follows = flight.replayed if self._lookahead == "replayed" else self._lookahead == "all"
        if not follows or flight.error is not None:
            return None
        plan = self._batch.plan_ahead(flight.plan)
        if plan is None:
            return None
        ahead, top = self._new(plan), flight.top
        with ahead.noting():
            tokens_B = flight.tokens_for(plan)
            ahead.inputs, ahead.history = self._inputs.of(plan, tokens_B), self._histories.of(plan)
            with flight.noting():  # its exchanges have to end before others begin
                self._settle(flight)
            if flight.error is None and flight.top is top:
                self._fly(ahead, ahead=1)
        if ahead.top is None or ahead.error is not None:
            if ahead.error is not None and not isinstance(ahead.error, RequestError):
                logger.warning("A step launched ahead failed, and is planned anew.", exc_info=ahead.error)
            self._abandon(ahead)  # planned anew; where it fails again, that is told
            return None
        return ahead

    def _fly(self, flight: Flight, *, ahead: int = 0) -> None:
        """Up through the layers and to the draws. Again is safe: KV slots are overwritten, draws are keyed.

        Args:
            ahead: how many tokens its inputs are further than its sequences know.
        """
        assert flight.inputs is not None
        waited_s = self._waited_s()
        climbed = self._climb(flight.inputs, flight.number)
        flight.split, flight.replayed, flight.sizes = climbed.split, climbed.replayed, climbed.sizes
        flight.waited_s += self._waited_s() - waited_s
        try:
            flight.top = Top.of(
                flight.plan, flight.inputs, climbed.x_TD, self._model, self._sampler, flight.history, ahead
            )
        except BaseException:
            self._settled()
            raise
        flight.landing = self._mark(self._model.device)

    def _settle(self, flight: Flight) -> None:
        """Until its exchanges have ended well; the link bounds for how long."""
        while not flight.settled:
            flight.settled = self._settled()
            if not flight.settled:
                self._fly(flight)

    def _land(self, flight: Flight) -> None:
        """Read ``flight`` and account for it. The device computes what was launched after it."""
        outcomes = self._outcomes(flight)
        if flight.redrawn:
            self._drop_ahead()
        now = time.perf_counter()
        seconds, self._landed = now - max(flight.began, self._landed), now
        if flight.error is None:
            self._overlap.note(flight.sizes, StepTime(seconds=seconds, waited_s=flight.waited_s), split=flight.split)
        if wipe := self._batch.complete(flight.plan, outcomes):
            self._kv.wipe(wipe)
        self.steps += 1
        self.overlapped_steps += flight.split
        self.step_tokens, self.step_seconds, self.step_overlapped = flight.plan.tokens, seconds, flight.split

    def _outcomes(self, flight: Flight) -> list[Outcome]:
        plan = flight.plan
        try:
            self._settle(flight)
            return flight.outcomes(self._model)
        except RequestError as error:
            return [Outcome(error=error)] * plan.sequences
        except MeshBroken:
            raise  # no step can follow: this worker ends, and what it holds goes on elsewhere
        except Exception:
            logger.exception("A step of %d sequences failed; each is tried by itself.", plan.sequences)
        self._drop_ahead()
        if plan.sequences == 1:
            return [Outcome(error=_step_failed())]
        return [outcome for alone in plan.one_by_one() for outcome in self._alone(alone)]

    def _alone(self, plan: StepPlan) -> list[Outcome]:
        ended = any(not state.blocks for state in plan.decodes)
        return [Outcome(error=_step_failed())] if ended else self._outcomes(self._launch(plan))

    def _drop_ahead(self) -> None:
        """What was launched after the step that is being read follows from what is not so."""
        flight, self._ahead = self._ahead, None
        if flight is not None:
            self._abandon(flight)

    def _abandon(self, flight: Flight) -> None:
        """As if it had never been launched, with zeros where it wrote keys and values: no NaN stays behind."""
        if flight.top is not None and not flight.settled:
            with suppress(RequestError):
                self._settled()
        if flight.inputs is not None:
            self._kv.clear(flight.inputs.slots_T)
        self._batch.abandon(flight.plan)

    def _new(self, plan: StepPlan) -> Flight:
        self._launched += 1
        return Flight(plan=plan, number=self._launched, began=time.perf_counter())


def _step_failed() -> RequestError:
    return InternalError("The step that computed this request failed.", hint="The worker's log has the cause.")
