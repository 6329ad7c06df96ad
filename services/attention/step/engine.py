"""The engine of an attention worker: requests go in, every :meth:`Engine.step` computes one iteration, events come out.

The engine is single-threaded and knows neither Redis nor asyncio. A step is planned (batch manager), flattened, run
through the layers (runner), sampled and accounted for, in the order of :mod:`services.attention.step.pipeline`.
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
from services.attention.batching.pace import Pace
from services.attention.batching.state_slots import StateSlots
from services.attention.kv_cache import KVCache, blocks_within
from services.attention.sampling.sampler import Sampler
from services.attention.sequences.plan import BatchLimits
from services.attention.sequences.trace import SequenceTraces
from services.attention.speculation.drafting import Drafting
from services.attention.speculation.gate import Gate
from services.attention.speculation.ngram import NgramSpeculator
from services.attention.speculation.several import Several
from services.attention.speculation.speculator import Drafter, Speculator
from services.attention.speculation.woken import WokenExperts
from services.attention.step.cuda_graphs import Capture, StepGraphs
from services.attention.step.flatten import Flattener
from services.attention.step.overlap import OverlapPolicy
from services.attention.step.pipeline import Lookahead, StepPipeline
from services.attention.step.runner import StepRunner
from services.attention.step.stats import Durations, EngineStats, taken
from services.attention.step.traced_exchanges import TracedExchanges
from services.attention.step.traced_pipeline import TracedPipeline
from services.attention.step.warmup import dummy_batches
from services.config.speculation import SpeculativeConfig
from services.errors import InternalError
from services.fabric.link import LOCAL, ExpertLink, RemoteLink
from services.fabric.local import LocalLink
from services.messages import GenerateRequest, TokenEvent
from services.model.dense import DenseModel
from services.model.state_room import state_slots
from services.prefix import PrefixScope
from services.runtime.tracing import Tracer

HandleT = TypeVar("HandleT")
WARMUP_S = 120.0
"""The longest warm-up. Kernels that it has not reached by then are loaded when a request first needs them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """The settings of an engine, named as in :class:`services.config.Settings`."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    kv_blocks: int | None = None
    kv_memory_gib: float = 1.0
    block_size: int = 16
    prefix_cache: bool = True
    prefix_cache_scope: PrefixScope = "tenant"
    lookahead: Lookahead = "off"
    prefill_stretch: float | None = None
    """How many times as long as without prompts a step may take while sequences decode; None: as long as it takes."""
    speculative_config: SpeculativeConfig | None = None
    """How tokens are drafted; None: they are not."""


@dataclass(frozen=True, slots=True)
class EngineTracing:
    """What an engine traces with. ``remote`` is the link to experts in other processes, which get the context of traced
    steps; None where there are none, or no room for it."""

    tracer: Tracer
    remote: RemoteLink | None


class Engine(Generic[HandleT]):
    """Serves requests by iterations.

    Args:
        link: takes rows to their experts and back.
        clock: returns the time of Redis in milliseconds; deadlines of requests are given in it.
        overlap: decides which steps run as two micro-batches; None: no step does.
        capture: captures steps as CUDA graphs; None: no step is captured.
        tracing: None where nothing is traced.
        drafter: makes speculators for drafts by a model; None: there is no such model.
    """

    def __init__(
        self,
        *,
        model: DenseModel,
        link: ExpertLink[HandleT],
        options: EngineOptions,
        clock: Callable[[], int],
        overlap: OverlapPolicy | None = None,
        capture: Capture | None = None,
        tracing: EngineTracing | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        spec = model.spec
        self._model, self._link, self._clock, self._lookahead = model, link, clock, options.lookahead
        self._tracing, self._drafter = tracing, drafter
        self._woken: WokenExperts | None = None
        self._overlap = overlap or OverlapPolicy("off")
        self._device = model.device
        blocks = options.kv_blocks or blocks_within(
            options.kv_memory_gib, spec, block_size=options.block_size, dtype=model.dtype
        )
        max_model_len = options.max_model_len or spec.max_position
        self._kv = KVCache(
            spec,
            num_blocks=blocks,
            block_size=options.block_size,
            dtype=model.dtype,
            device=model.device,
            state_slots=state_slots(spec, options.max_num_seqs),
        )
        self._speculative_config = options.speculative_config
        self._capture, self._most = capture, (options.max_num_batched_tokens, options.max_num_seqs, max_model_len)
        self._graphs = self._new_graphs()
        self._limits = BatchLimits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            prefix_cache=options.prefix_cache,
            prefix_cache_scope=options.prefix_cache_scope,
        )
        self._sampler = Sampler(spec.vocab_size, model.device)
        self._pace = None if options.prefill_stretch is None else Pace(options.prefill_stretch)
        self._reset()

    def _new_graphs(self) -> StepGraphs[HandleT] | None:
        if self._capture is None:
            return None
        rows, seqs, length = self._most
        parts = self._model, self._link, self._kv
        trees = self._speculative_config is not None and self._speculative_config.num_branches > 1
        return StepGraphs(*parts, capture=self._capture, max_rows=rows, max_seqs=seqs, max_len=length, trees=trees)

    def _reset(self) -> None:
        """Forget all requests, cached prefixes and figures."""
        states = self._new_states()
        self._pool = BlockPool(self._kv.num_blocks, self._kv.block_size, states)
        self._inputs = Flattener(self._kv.block_size, self._device, states)
        traces = self._traces = None if self._tracing is None else SequenceTraces(self._tracing.tracer)
        drafting = self._drafting = self._new_drafting()
        self._batch = BatchManager(
            self._limits, self._pool, self._clock, traces=traces, pace=self._pace, drafting=drafting
        )
        if self._graphs is not None:
            self._graphs.steps = 0
        self._runner = StepRunner(self._model, self._link, self._kv, graphs=self._graphs, overlap=self._overlap)
        parts = self._batch, self._inputs, self._runner, self._sampler
        if (tracing := self._tracing) is None or traces is None:
            self._steps = StepPipeline(*parts, lookahead=self._lookahead, pace=self._pace, drafting=drafting)
        else:
            travels = self._link.transport != LOCAL
            exchange = TracedExchanges(self._runner.link, tracing.remote) if travels else None
            self._steps = TracedPipeline(
                *parts,
                lookahead=self._lookahead,
                pace=self._pace,
                drafting=drafting,
                tracer=tracing.tracer,
                traces=traces,
                exchange=exchange,
            )

    def _new_states(self) -> StateSlots | None:
        slots = state_slots(self._model.spec, self._limits.max_num_seqs)
        return StateSlots(slots, self._kv.block_size, keeps=self._limits.prefix_cache) if slots else None

    def _new_drafting(self) -> Drafting | None:
        if (config := self._speculative_config) is None:
            return None
        self._woken = WokenExperts(self._link) if isinstance(self._link, LocalLink) else None
        gate = Gate(config.num_speculative_tokens, config.num_branches)
        return Drafting(self._new_speculator(config), gate, self._pool, woken=self._woken)

    def _new_speculator(self, config: SpeculativeConfig) -> Speculator:
        if self._drafter is None:
            return NgramSpeculator(config)
        drafts = self._drafter.speculator()
        return Several([drafts, NgramSpeculator(config)]) if config.num_branches > 1 else drafts

    def _drop_all(self) -> None:
        for request_id, attempt in self.held().items():
            self.cancel(request_id, attempt)
        while self.has_work:  # a step launched ahead may be in flight
            self.step()

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU, whose kernels have to be loaded before they run."""
        return self._device.type == "cuda"

    def prepare(self) -> None:
        """Capture CUDA graphs, if the engine uses them. Takes seconds. Call it before the first step.

        Raises:
            ConfigError: a graph cannot be captured.
        """
        if self._graphs:
            self._graphs.prepare()
        if self._drafter:
            self._drafter.prepare()

    def warm_up(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Serve dummy requests and forget them, to have kernels compiled and loaded. The engine must hold no request.

        Takes seconds on a GPU. Where the experts cannot be reached the warm-up ends early, and a log line says so. The
        experts count its rows like any others.

        Args:
            stopped: asked before each step; the warm-up ends when it returns True.

        Raises:
            InternalError: a step failed.
        """
        assert not self.has_work
        began, overlap = time.monotonic(), self._overlap
        self._overlap = OverlapPolicy("off")  # dummy steps must not teach it anything
        self._reset()
        try:
            for requests in dummy_batches(self._limits, self._kv.num_blocks * self._kv.block_size):
                for request in requests:
                    self.add(request)
                while self.has_work:
                    late = time.monotonic() > began + WARMUP_S
                    error = next((event.error for event in self.step() if event.error), None)
                    if error and error.code == InternalError.code:
                        raise InternalError("A dummy request failed.", hint="The log has the cause.")
                    if error or late or stopped():
                        why = error.message if error else "it took too long" if late else "the worker is stopping"
                        log.warning("warm-up is incomplete: %s", why)
                        self._drop_all()
                        return
            log.info("warmed up in %.1f s", time.monotonic() - began)
        finally:
            self._overlap = overlap
            if self._pace is not None:
                self._pace.warmed_up()
            self._reset()

    def sleep(self) -> None:
        """Give up the KV cache with its prefixes, and CUDA graphs. The engine must hold no request, and gets none until
        :meth:`wake_up`."""
        assert not self.has_work
        self._graphs = None
        self._kv.free()
        if self._drafter:
            self._drafter.free()
        self._reset()

    def wake_up(self) -> None:
        """Take the memory again; :meth:`prepare` is due after it. Raises OutOfMemory."""
        self._kv.allocate()
        self._graphs = self._new_graphs()
        if self._drafter:
            self._drafter.allocate()
        self._reset()

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to compute or to report."""
        return self._batch.has_work or self._steps.in_flight

    def add(self, request: GenerateRequest) -> None:
        """Accept ``request``. One that cannot run ends with an error event in the next step."""
        self._batch.add(request)

    def cancel(self, request_id: str, attempt: int) -> None:
        """End the request if its attempt is at most ``attempt``. A step in flight keeps its blocks till its end."""
        self._batch.cancel(request_id, attempt)

    def held(self) -> dict[str, int]:
        """Return the attempt of every request that has not ended."""
        return self._batch.held()

    def in_step(self) -> dict[str, int]:
        """Return the attempt of every request that steps compute now, without those that wait."""
        return self._batch.in_step()

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Compute one iteration. Returns events in order, also those of requests that ended since the last step. With
        ``lookahead`` the next iteration may be in flight when this returns.

        A step that raises ends the requests that caused it, and no others; the engine lives on.
        """
        self._steps.step()
        return self._batch.drain()

    def exemplar(self) -> dict[str, str] | None:
        """Return what a histogram remembers the last step by, if a sequence in it is traced."""
        return None if self._traces is None else self._traces.exemplar

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
            draft_chains=counters.chains,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            draft_step_experts=self._woken.hit if self._woken else 0,
            woken_experts=self._woken.by_drafts if self._woken else 0,
            drafting_failures=self._drafter.failures if self._drafter else {},
            steps=self._steps.steps,
            step_tokens=self._steps.step_tokens,
            step_seconds=self._steps.step_seconds,
            step_overlapped=self._steps.step_overlapped,
            overlapped_steps=self._steps.overlapped_steps,
            exchange_wait_seconds=self._runner.waited_s,
            steps_ahead=self._steps.launched_ahead,
            graph_steps=self._graphs.steps if self._graphs else 0,
            graphs=self._graphs.captures if self._graphs else 0,
            graph_failures=self._graphs.failures if self._graphs else 0,
            step_failures=self._steps.failures,
        )

    def take_durations(self) -> Durations:
        """Return what was timed since the last call. Call it from the thread that steps."""
        return Durations(
            batch_waits=taken(self._batch.waits),
            prefills=taken(self._batch.prefills),
            exchanges=self._runner.take_exchanges(),
            draftings=taken(self._drafting.draftings) if self._drafting else (),
            verifications=taken(self._drafting.verifications) if self._drafting else (),
        )
