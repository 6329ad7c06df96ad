"""The engine of an attention worker: requests go in, every :meth:`Engine.step` computes one iteration, events come out.

Single-threaded; it knows neither Redis nor asyncio. One step is: plan (batch manager), flatten, forward through dense
part and experts, draw, account; :mod:`services.attention.step.pipeline` says when each of it is done.
Legend: T rows of a step, D hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from services.attention.batching.blocks import BlockPool
from services.attention.batching.manager import BatchManager
from services.attention.kv_cache import KVCache, blocks_within
from services.attention.sampling.sampler import Sampler
from services.attention.sequences.plan import BatchLimits
from services.attention.step.cuda_graphs import Capture, StepGraphs
from services.attention.step.flatten import Flattener
from services.attention.step.forward import forward
from services.attention.step.micro_batches import split
from services.attention.step.overlap import OverlapPolicy
from services.attention.step.pipeline import Climbed, Lookahead, Stepper
from services.attention.step.warmup import rounds
from services.errors import ConfigError, InternalError
from services.fabric.link import ExpertLink
from services.fabric.timed import TimedLink
from services.messages import GenerateRequest, TokenEvent
from services.model.dense import DenseModel
from services.model.inputs import StepInputs
from services.prefix import PrefixScope

HandleT = TypeVar("HandleT")
PROBE_STEPS = 32
"""Where a link gives no key a split may pay, which stands in a graph's way: how often a step is left whole then."""
REHEARSAL_S = 120.0
"""What has not been rehearsed by then is met in service."""

log = logging.getLogger(__name__)


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
    prefix_cache_scope: PrefixScope = "tenant"
    chunked_prefill: bool = True
    lookahead: Lookahead = "off"


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
    """Run as two micro-batches. A total, as are those below."""
    exchange_wait_seconds: float
    steps_ahead: int
    """Launched before the step before them was read."""
    graph_steps: int
    """Run by CUDA graph; those that were run again count again."""
    graphs: int
    """Captured by now."""


class Engine(Generic[HandleT]):
    """``clock`` gives Redis TIME in milliseconds, by which deadlines are told; without ``overlap`` there is none, and
    without ``capture`` no step is replayed."""

    def __init__(
        self,
        *,
        model: DenseModel,
        link: ExpertLink[HandleT],
        options: EngineOptions,
        clock: Callable[[], int],
        overlap: OverlapPolicy | None = None,
        capture: Capture | None = None,
    ) -> None:
        spec = model.spec
        self._model, self._link, self._clock, self._lookahead = model, link, clock, options.lookahead
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
        self._graphs: StepGraphs[HandleT] | None = None
        if capture is not None:
            self._graphs = StepGraphs(
                model,
                link,
                self._kv,
                capture=capture,
                max_rows=options.max_num_batched_tokens,
                max_len=self.max_model_len,
            )
        self._inputs = Flattener(options.block_size, model.device)
        self._limits = BatchLimits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            prefix_cache=options.prefix_cache,
            prefix_cache_scope=options.prefix_cache_scope,
            chunked_prefill=options.chunked_prefill,
        )
        self._sampler = Sampler(spec.vocab_size, model.device)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Without requests, prefixes and figures."""
        self._timed = TimedLink(self._link)
        self._pool = BlockPool(self._kv.num_blocks, self._kv.block_size)
        self._batch = BatchManager(self._limits, self._pool, self._clock)
        self._eager = 0
        """Steps in a row that suited a graph and were run without."""
        if self._graphs is not None:
            self._graphs.steps = 0
        self._stepper = Stepper(
            batch=self._batch,
            inputs=self._inputs,
            climb=self._climb,
            settled=self._settled,
            waited_s=lambda: self._timed.waited_s,
            model=self._model,
            sampler=self._sampler,
            kv=self._kv,
            overlap=self._overlap,
            lookahead=self._lookahead,
        )

    def _drop_all(self) -> None:
        for request_id, attempt in self.held().items():
            self.cancel(request_id, attempt)
        while self.has_work:  # a step launched ahead is under way
            self.step()

    @property
    def on_gpu(self) -> bool:
        """Whether kernels have to be loaded before they run."""
        return self._device.type == "cuda"

    def prepare(self) -> None:
        """Capture the graphs of steps, if there are to be any. Takes seconds; before the first step.

        Raises:
            ConfigError: they cannot be captured.
        """
        if self._graphs:
            self._graphs.prepare()

    def rehearse(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Answer made-up requests and forget them: kernels are compiled and loaded, and buffers made, before anybody
        waits for it. Nothing may be held. Takes seconds on a GPU, most of them where that was never done; the experts
        have to be there, and what comes without them is left to be met in service. Experts count its rows as any.

        Args:
            stopped: asked before each step; then the rest is left out.

        Raises:
            InternalError: a step failed that should not.
        """
        assert not self.has_work
        began, overlap = time.monotonic(), self._overlap
        self._overlap = OverlapPolicy("off")  # nothing is to be learned from it
        self._begin_anew()
        try:
            for asked in rounds(self._limits, self.kv_tokens):
                for request in asked:
                    self.add(request)
                while self.has_work:
                    late = time.monotonic() > began + REHEARSAL_S
                    told = next((event.error for event in self.step() if event.error), None)
                    if told and told.code == InternalError.code:
                        raise InternalError("A made-up request failed.", hint="The log has the cause.")
                    if told or late or stopped():
                        why = told.message if told else "it took too long" if late else "the worker is to end"
                        log.warning("rehearsed in part only: %s", why)
                        self._drop_all()
                        return
            log.info("rehearsed after %.1f s", time.monotonic() - began)
        finally:
            self._overlap = overlap
            self._begin_anew()

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to compute or to tell."""
        return self._batch.has_work or self._stepper.under_way

    def add(self, request: GenerateRequest) -> None:
        """Take ``request`` in; what cannot run ends with an error event in the next step."""
        self._batch.add(request)

    def cancel(self, request_id: str, attempt: int) -> None:
        """End the request if the attempt held is at most ``attempt``. Its blocks are free when this returns, or when
        the step that is under way with a row of it has ended."""
        self._batch.cancel(request_id, attempt)

    def held(self) -> dict[str, int]:
        """Attempt of every request that has not ended."""
        return self._batch.held()

    def in_step(self) -> dict[str, int]:
        """Attempt of every request that steps compute now; the others wait."""
        return self._batch.in_step()

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Compute one iteration. Events in order; also those of requests that ended since the last step. With
        ``lookahead`` the iteration after it may be under way when this returns.

        A step that raises ends the requests that caused it, and no others; the engine lives on.
        """
        self._stepper.step()
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
            steps=self._stepper.steps,
            step_tokens=self._stepper.step_tokens,
            step_seconds=self._stepper.step_seconds,
            step_overlapped=self._stepper.step_overlapped,
            overlapped_steps=self._stepper.overlapped_steps,
            exchange_wait_seconds=self._timed.waited_s,
            steps_ahead=self._stepper.launched_ahead,
            graph_steps=self._graphs.steps if self._graphs else 0,
            graphs=self._graphs.captures if self._graphs else 0,
        )

    def _climb(self, inputs: StepInputs, number: int) -> Climbed:
        """Whether it is right, :meth:`_settled` says; that has been asked where this raises. ``number`` names the step.

        While steps that suit a graph are replayed none of them is split, unless the policy insists: launches in each
        layer take longer than what a split would hide. Nor is anything learned from them about those that may be. While
        they are not, for want of a key, one in a while is left whole to see.
        """
        suit = self._graphs is not None and self._graphs.suit(inputs)
        whole = suit and not self._overlap.insists and self._eager % PROBE_STEPS == 0
        sizes = inputs.sizes if self._overlap.active and not whole else ()
        micro_batches = split(inputs, self._overlap.cut(sizes))
        self._timed.begin_step(number, [len(part.token_ids_T) for part in micro_batches])
        try:
            x_TD = self._graphs.replayed(micro_batches) if self._graphs and suit else None
            replayed = x_TD is not None
            if x_TD is None:
                x_TD = forward(self._model, self._timed, self._kv, micro_batches)
        except BaseException:
            self._timed.settled()
            raise
        if suit:
            self._eager = 0 if replayed else self._eager + 1
        return Climbed(x_TD, split=len(micro_batches) > 1, replayed=replayed, sizes=() if replayed else sizes)

    def _settled(self) -> bool:
        """Whether the last climb is right; else it is to be done again."""
        right = self._timed.settled()
        if right and self._graphs:
            self._graphs.settled()
        return right


def _max_model_len(asked: int | None, max_position: int) -> int:
    if asked is not None and asked > max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {max_position} positions that the checkpoint was made for.",
            hint="Lower it or leave it out.",
        )
    return asked or max_position
