"""The engine of an attention worker: requests go in, every :meth:`Engine.step` computes one iteration, events come out.

Synchronous and single-threaded; it knows neither Redis nor asyncio. One step is: plan (batch manager), flatten,
forward through dense part and experts, draw, account.
Legend: T rows of a step, R rows whose logits are wanted, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from services.attention.batch import BatchManager
from services.attention.blocks import BlockPool
from services.attention.cache import KVCache, blocks_within
from services.attention.flatten import Flattener
from services.attention.forward import forward
from services.attention.logprobs import token_logprobs
from services.attention.micro_batches import split
from services.attention.overlap import OverlapPolicy, StepTime
from services.attention.plan import BatchLimits, Outcome, Piece, StepPlan
from services.attention.sampling import Sampler, broken_logits
from services.errors import ConfigError, InternalError, MeshBroken, RequestError
from services.fabric.experts import ExpertLink
from services.fabric.timed import TimedLink
from services.messages import GenerateRequest, TokenEvent, TokenLogprob
from services.model.dense import DenseModel
from services.model.inputs import StepInputs

HandleT = TypeVar("HandleT")
SCORED_ROWS = 64
"""Prompt rows scored at a time, so that echoed log-probabilities do not need [prompt, vocabulary] floats at once."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """The knobs of an engine, named as in :class:`services.config.Settings`."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    kv_blocks: int | None = None
    kv_memory_gib: float = 1.0
    block_size: int = 16
    prefix_cache: bool = True
    chunked_prefill: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A reading of the engine. The first group are levels, the second totals, the third is the last step's."""

    running: int
    waiting: int
    kv_blocks: int
    kv_used: int
    kv_cached: int
    kv_empty: int

    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    prefill_chunks: int
    prefill_tokens: int
    decode_tokens: int
    steps: int

    step_tokens: int
    step_seconds: float
    step_overlapped: bool

    overlapped_steps: int
    """Run as two micro-batches. A total, as is the next."""
    exchange_wait_seconds: float


class Engine(Generic[HandleT]):
    """``clock`` gives Redis TIME in milliseconds, by which deadlines are told; without ``overlap`` there is none."""

    def __init__(
        self,
        *,
        model: DenseModel,
        link: ExpertLink[HandleT],
        options: EngineOptions,
        clock: Callable[[], int],
        overlap: OverlapPolicy | None = None,
    ) -> None:
        spec = model.spec
        self._model, self._timed = model, TimedLink(link)
        self._overlap = overlap or OverlapPolicy("off")
        self._device = model.device
        blocks = options.kv_blocks or blocks_within(
            options.kv_memory_gib, spec, block_size=options.block_size, dtype=model.dtype
        )
        self.max_model_len = _max_model_len(options.max_model_len, spec.max_position)
        self.kv_tokens = blocks * options.block_size
        self._kv = KVCache(
            spec, num_blocks=blocks, block_size=options.block_size, dtype=model.dtype, device=model.device
        )
        self._pool = BlockPool(blocks, options.block_size)
        self._inputs = Flattener(options.block_size, model.device)
        limits = BatchLimits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            prefix_cache=options.prefix_cache,
            chunked_prefill=options.chunked_prefill,
        )
        self._batch = BatchManager(limits, self._pool, clock)
        self._sampler = Sampler(spec.vocab_size, model.device)
        self._steps, self._step_tokens, self._step_seconds = 0, 0, 0.0
        self._overlapped_steps, self._step_overlapped = 0, False

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to compute or to tell."""
        return self._batch.has_work

    def add(self, request: GenerateRequest) -> None:
        """Take ``request`` in; what cannot run ends with an error event in the next step."""
        self._batch.add(request)

    def cancel(self, request_id: str, attempt: int) -> None:
        """End the request if the attempt held is at most ``attempt``. Its blocks are free when this returns."""
        self._batch.cancel(request_id, attempt)

    def held(self) -> dict[str, int]:
        """Attempt of every request that has not ended."""
        return self._batch.held()

    def in_step(self) -> dict[str, int]:
        """Attempt of every request that steps compute now; the others wait."""
        return self._batch.in_step()

    def step(self) -> list[TokenEvent]:
        """Compute one iteration. Events in order; also those of requests that ended since the last step.

        A step that raises ends the requests that caused it, and no others; the engine lives on.
        """
        started = time.perf_counter()
        plan = self._batch.plan()
        if plan.sequences:
            wipe = self._batch.complete(plan, self._outcomes(plan))
            if wipe:
                self._kv.wipe(wipe)
            self._steps += 1
            self._step_tokens, self._step_seconds = plan.tokens, time.perf_counter() - started
        return self._batch.drain()

    def stats(self) -> EngineStats:
        counters = self._batch.counters
        return EngineStats(
            running=self._batch.running,
            waiting=self._batch.waiting,
            kv_blocks=self._pool.num_blocks,
            kv_used=self._pool.used,
            kv_cached=self._pool.cached,
            kv_empty=self._pool.empty,
            prefix_query_tokens=self._pool.query_tokens,
            prefix_hit_tokens=self._pool.hit_tokens,
            preemptions=counters.preemptions,
            prefill_chunks=counters.prefill_chunks,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            steps=self._steps,
            step_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            step_overlapped=self._step_overlapped,
            overlapped_steps=self._overlapped_steps,
            exchange_wait_seconds=self._timed.waited_s,
        )

    def _outcomes(self, plan: StepPlan) -> list[Outcome]:
        try:
            return self._compute(plan)
        except RequestError as error:
            return [Outcome(error=error)] * plan.sequences
        except MeshBroken:
            raise  # no step can follow: this worker ends, and what it holds goes on elsewhere
        except Exception:
            logger.exception("A step of %d sequences failed; each is tried by itself.", plan.sequences)
        if plan.sequences == 1:
            return [Outcome(error=_step_failed())]
        # Running a piece again is safe: its KV slots are overwritten and its draws are keyed.
        return [outcome for alone in plan.one_by_one() for outcome in self._outcomes(alone)]

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> list[Outcome]:
        """Nothing waits for the device before the draws do: the host prepares them while the layers run."""
        inputs = self._inputs.of(plan)
        sizes = inputs.sizes if self._overlap.active else []
        began, waited_s = time.perf_counter(), self._timed.waited_s
        x_TD = self._climb(inputs, sizes)
        rows = [state.row for state in plan.decodes]
        rows += [piece.state.row for piece in plan.prompts if piece.draws]
        x_RD = x_TD[inputs.logits_rows_R] if plan.prompts else x_TD
        outcomes = self._sampler.draw(self._model.logits(x_RD[: len(rows)]), rows) if rows else []
        if plan.prompts:
            outcomes = self._with_prompts(plan, outcomes, x_RD[len(rows) :])
        healthy = _healthy(x_TD, inputs)
        took = StepTime(seconds=time.perf_counter() - began, waited_s=self._timed.waited_s - waited_s)
        self._overlap.note(sizes, took)
        if all(healthy):
            return outcomes
        return [o if is_healthy else _broken() for o, is_healthy in zip(outcomes, healthy, strict=True)]

    def _climb(self, inputs: StepInputs, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """``x_TD`` after the last layer, in one or two micro-batches."""
        micro_batches = split(inputs, self._overlap.cut(sizes))
        self._step_overlapped = len(micro_batches) > 1
        self._overlapped_steps += self._step_overlapped
        rows = [len(part.token_ids_T) for part in micro_batches]
        while True:  # again is as safe as in _outcomes; the link bounds for how long
            self._timed.begin_step(self._steps, rows)
            try:
                x_TD = forward(self._model, self._timed, self._kv, micro_batches)
            except BaseException:
                self._timed.settled()
                raise
            if self._timed.settled():
                return x_TD

    def _with_prompts(self, plan: StepPlan, drawn: list[Outcome], x_RD: Tensor) -> list[Outcome]:
        """One outcome per sequence of ``drawn``, one per draw, and ``x_RD``, the rows that score prompts."""
        decodes = len(plan.decodes)
        draws, scores = iter(drawn[decodes:]), self._scores(x_RD, plan.prompts)
        outcomes = drawn[:decodes]
        for piece in plan.prompts:
            outcome = next(draws) if piece.draws else Outcome()
            outcomes.append(_with_scores(outcome, [next(scores) for _ in piece.scored]))
        return outcomes

    def _scores(self, x_RD: Tensor, pieces: Sequence[Piece]) -> Iterator[TokenLogprob]:
        """Log-probabilities of the prompt tokens that ``pieces`` score, in order."""
        targets = [(piece.state, position) for piece in pieces for position in piece.scored]
        for start in range(0, len(targets), SCORED_ROWS):
            part = targets[start : start + SCORED_ROWS]
            logits_RV = self._model.logits(x_RD[start : start + SCORED_ROWS])
            token_ids = [state.token_ids[position] for state, position in part]
            alternatives = [state.request.sampling.prompt_logprobs or 0 for state, _ in part]
            yield from token_logprobs(logits_RV, token_ids, alternatives)


def _healthy(x_TD: Tensor, inputs: StepInputs) -> list[bool]:
    """Whether all rows of each sequence are finite."""
    finite_T = x_TD.isfinite().all(dim=-1)
    decodes = len(inputs.decodes or ())
    if bool(finite_T.all()):
        return [True] * (decodes + len(inputs.sequences))
    prompts = [bool(finite_T[rows.start : rows.start + rows.length].all()) for rows in inputs.sequences]
    return finite_T[:decodes].tolist() + prompts


def _with_scores(outcome: Outcome, scores: list[TokenLogprob]) -> Outcome:
    if any(math.isnan(score.logprob) for score in scores):
        return _broken()
    if not scores or outcome.error is not None:
        return outcome
    return Outcome(token_id=outcome.token_id, logprob=outcome.logprob, prompt_logprobs=scores)


def _broken() -> Outcome:
    return Outcome(error=broken_logits())


def _step_failed() -> RequestError:
    return InternalError("The step that computed this request failed.", hint="The worker's log has the cause.")


def _max_model_len(asked: int | None, max_position: int) -> int:
    if asked is not None and asked > max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {max_position} positions that the checkpoint was made for.",
            hint="Lower it or leave it out.",
        )
    return asked or max_position
