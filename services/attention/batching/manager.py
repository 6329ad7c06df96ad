"""The batch manager: decides, before every iteration, which tokens of which sequences are computed. Pure Python.

Requests come in through :meth:`BatchManager.add`. ``plan`` decides what the next step computes, ``plan_ahead`` what the
step after it computes before the first one's tokens are known, and ``complete`` takes the outcomes. Events come out of
:meth:`BatchManager.drain`; every request that was accepted ends with exactly one event that has a ``finish``.

Batching is per iteration, with prompt and generated tokens in one row dimension without padding (ExpertFlow 4.2).
Decoding sequences go first, one token each; the rest of the token budget goes to prompts, in chunks, in the order of a
:class:`WaitingLine`. An admitted sequence gets blocks for all its known tokens at once, so only decoding can run out of
blocks; then the sequence that was admitted last gives up its blocks and is recomputed later.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from services.attention.batching.blocks import BlockPool, HeldBack, Prefixes, make_room, reserve
from services.attention.batching.pace import Pace
from services.attention.batching.waiting_line import WaitingLine
from services.attention.sequences.plan import BatchCounters, BatchLimits, Outcome, Piece, StepPlan
from services.attention.sequences.sequence import SequenceState, open_sequence, refusal
from services.attention.sequences.trace import SequenceTraces
from services.attention.speculation.drafting import Drafting
from services.errors import DeadlineExceeded, RequestError
from services.messages import FinishReason, GenerateRequest, TokenEvent

KEPT_SEQUENCES = 4096
"""Of how many sequences times are kept for whoever takes them."""


class BatchManager:
    """Waiting and running sequences over a :class:`BlockPool`. ``clock`` gives Redis TIME in milliseconds, ``timer``
    seconds for durations; ``traces`` is None where no request is traced; ``pace`` bounds prompts beside decodes, and
    ``drafting`` adds drafts, None where it is off."""

    def __init__(
        self,
        limits: BatchLimits,
        pool: BlockPool,
        clock: Callable[[], int],
        *,
        timer: Callable[[], float] = time.perf_counter,
        traces: SequenceTraces | None = None,
        pace: Pace | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        assert limits.max_num_seqs > 0
        assert limits.max_num_batched_tokens > 0
        self.pool = pool
        self.counters = BatchCounters()
        self.waits: deque[float] = deque(maxlen=KEPT_SEQUENCES)
        """Seconds from a sequence's arrival to its first step."""
        self.prefills: deque[float] = deque(maxlen=KEPT_SEQUENCES)
        """Seconds from a sequence's first step to its first token."""
        self._timer = timer
        self._limits = limits
        self._prefixes = Prefixes(pool, enabled=limits.prefix_cache, scope=limits.prefix_cache_scope)
        self._held_back = HeldBack(pool)
        self._clock = clock
        self._traces, self._pace, self._drafting = traces, pace, drafting
        self._held: dict[str, SequenceState] = {}
        self._waiting: WaitingLine[SequenceState] = WaitingLine()
        self._running: list[SequenceState] = []
        self._decodes: tuple[SequenceState, ...] = ()
        """Decodes of the last plan, without those that had drafts; () once a sequence has come or gone since."""
        self._events: list[TokenEvent] = []
        self._next_deadline_ms = math.inf
        """No held request has an earlier deadline."""
        self._arrivals = 0
        self._admissions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._held or self._events)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def held(self) -> dict[str, int]:
        """Return the attempt of every request that has not ended."""
        return {request_id: state.request.attempt for request_id, state in self._held.items()}

    def in_step(self) -> dict[str, int]:
        """Return the attempt of every request that steps compute now, without those that wait."""
        return {state.request.id: state.request.attempt for state in self._running}

    def add(self, request: GenerateRequest) -> None:
        """Accept ``request``. A higher attempt replaces the held one without an event; other repeats are ignored."""
        held = self._held.get(request.id)
        if held is not None:
            if held.request.attempt >= request.attempt:
                return
            self._drop(held)
        self._arrivals += 1
        state = open_sequence(request, self._arrivals, self._limits.eos_token_ids)
        state.came_at = self._timer()
        error = refusal(
            request,
            max_model_len=self._limits.max_model_len,
            kv_tokens=self.pool.num_blocks * self.pool.block_size,
            vocab_size=self._limits.vocab_size,
        )
        self._held[request.id] = state
        if self._traces is not None:
            self._traces.added(state)
        self._next_deadline_ms = min(self._next_deadline_ms, request.deadline_ms)
        if error is not None:
            self._end(state, "error", error)
        elif not state.wants_token and state.scored is None:
            self._end(state, "length")
        else:
            self._waiting.add(state)

    def cancel(self, request_id: str, attempt: int) -> None:
        """End the request if the attempt held is at most ``attempt``. Its blocks are free when this returns, or, if a
        step launched ahead has a row of it, when that step is completed."""
        state = self._held.get(request_id)
        if state is not None and state.request.attempt <= attempt:
            self._end(state, "cancelled")

    def plan(self) -> StepPlan:
        """Plan the next step. The plan is empty only if no request is held."""
        self._expire()
        plan = StepPlan(decodes=self._decodes) if self._repeats() else self._planned()
        if self._drafting is not None:
            plan = self._drafting.extend(plan, self._room_for_drafts(plan.tokens))
        self._decodes = plan.decodes
        return plan

    def _planned(self) -> StepPlan:
        budget = self._limits.max_num_batched_tokens
        decodes, prompts = self._plan_decodes(budget), list[Piece]()
        budget = self._plan_prefills(prompts, self._room_beside(len(decodes)))
        self._admit(prompts, budget)
        assert decodes or prompts or not self._held, "sequences are held, but none can make progress"
        return StepPlan(decodes=tuple(decodes), prompts=tuple(prompts))

    def plan_ahead(self, plan: StepPlan, max_rows: int | None = None) -> StepPlan | None:
        """Plan the step after ``plan``, which is in flight: what decodes goes one token further, whatever ``plan``
        draws, prompts go on behind the pieces that ``plan`` has of them, and requests that wait are admitted.

        Sequences that ``max_tokens`` ends in ``plan`` are left out. Returns None where more may have to be done: scores
        of a prompt, a deadline, a preemption, drafts. The caller then completes ``plan`` and after it the step that is
        returned here, or gives that to :meth:`abandon`.

        Args:
            max_rows: a step of more rows is not launched ahead; None: no bound.
        """
        if any(piece.scored for piece in plan.prompts) or self._clock() >= self._next_deadline_ms:
            return None
        if self._drafting is not None and self._expects_drafts(plan):
            return None
        alive = plan.decodes if plan.decodes is self._decodes else tuple(one for one in plan.decodes if one.blocks)
        drew = tuple(piece.state for piece in plan.prompts if piece.draws and piece.state.blocks)
        goes_on = tuple(state for state in alive + drew if len(state.token_ids) + 1 < state.limit)
        if len(alive) < sum(not state.prefilling for state in self._running):  # more decode than a step may have rows
            return None
        if len(goes_on) > self._limits.max_num_batched_tokens or not make_room(self.pool, goes_on, 1):
            return None
        prompts = list[Piece]()
        if self._waiting or len(alive) + len(drew) < len(self._running):
            ends = {piece.state: piece.end for piece in plan.prompts}
            budget = self._plan_prefills(prompts, self._room_beside(len(goes_on)), ends)
            self._admit(prompts, budget, self._prefixes.under_way(plan.prompts))
        rows = len(goes_on) + sum(piece.length for piece in prompts)
        if not rows or (max_rows is not None and rows > max_rows):
            return None
        same = len(goes_on) == len(plan.decodes) and not drew
        ahead = StepPlan(decodes=plan.decodes if same else goes_on, prompts=tuple(prompts))
        self._held_back.launched(ahead)
        return ahead

    def abandon(self, plan: StepPlan) -> None:
        """Drop ``plan``, which was launched ahead and whose rows have left nothing behind; whom it admitted stays. No
        sequence may have ended since."""
        assert all(state.blocks for state in plan.states)
        self._held_back.abandoning(plan)

    def complete(self, plan: StepPlan, outcomes: Sequence[Outcome]) -> list[int]:
        """Account for the step, except for sequences that ended meanwhile. Returns blocks of failures, to be zeroed."""
        self._held_back.completing(plan)
        decodes = len(plan.decodes)
        to_zero = self._complete_decodes(plan.decodes, outcomes[:decodes])
        rest = iter(outcomes[decodes:])
        for chain, outcome in zip(plan.chains, rest, strict=False):
            to_zero += self._complete_chain(chain, outcome)
        for piece, outcome in zip(plan.prompts, rest, strict=True):
            if outcome.error is not None or not piece.state.blocks:
                to_zero += self._fail(piece.state, outcome.error)
            else:
                self._advance(piece, outcome)
        if self._traces is not None:
            self._traces.completed(plan.prompts)
        return to_zero

    def drain(self) -> list[TokenEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        if self._traces is not None:
            self._traces.ended(events)
        return events

    def _expire(self) -> None:
        now_ms = self._clock()
        if now_ms < self._next_deadline_ms:
            return
        for state in [state for state in self._held.values() if state.request.deadline_ms <= now_ms]:
            hint = "Ask for fewer tokens, or raise --request-timeout."
            self._end(state, "error", DeadlineExceeded("The request ran past its deadline.", hint=hint))
        self._next_deadline_ms = min((state.request.deadline_ms for state in self._held.values()), default=math.inf)

    def _repeats(self) -> bool:
        """Return whether the step is like the one before, each sequence one token further. Makes room for these tokens.

        True only where every running sequence decodes, none can be admitted and none has to be preempted.
        """
        decodes = self._decodes
        may_admit = self._waiting and self.running < self._limits.max_num_seqs
        return len(self._running) == len(decodes) > 0 and not may_admit and make_room(self.pool, decodes, 0)

    def _room_beside(self, decodes: int) -> int:
        """Return how many rows of prompts a step with so many decodes may have."""
        room = self._limits.max_num_batched_tokens - decodes
        paced = None if self._pace is None else self._pace.rows(decodes)
        return room if paced is None else min(room, paced)

    def _room_for_drafts(self, rows: int) -> int:
        """Return how many rows of drafts a step of ``rows`` rows may have: within the tokens of a step, and as if each
        were a sequence of its own, for draws take memory."""
        return min(self._limits.max_num_batched_tokens - rows, self._limits.max_num_seqs - len(self._running))

    def _expects_drafts(self, plan: StepPlan) -> bool:
        assert self._drafting is not None
        return self._drafting.expects(plan, self._room_for_drafts(len(plan.drawing)))

    def _plan_decodes(self, budget: int) -> list[SequenceState]:
        decodes: list[SequenceState] = []
        index = 0
        while index < len(self._running) and len(decodes) < budget:  # a preemption shortens the list from its tail
            state = self._running[index]
            index += 1
            if not state.prefilling and self._grow(state):
                decodes.append(state)
        return decodes

    def _grow(self, state: SequenceState) -> bool:
        """Make room for the next token of ``state``; False if ``state`` itself had to be preempted."""
        pool = self.pool
        if len(state.token_ids) <= len(state.blocks) * pool.block_size:
            return True
        while not pool.available:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        state.blocks += pool.take((), 1)
        return True

    def _preempt(self, state: SequenceState) -> None:
        self.counters.preemptions += 1
        if self._traces is not None:
            self._traces.preempted(state)
        self._drop(state)
        state.computed, state.preempted, state.prefilling = 0, True, True
        self._held[state.request.id] = state
        self._waiting.add(state)

    def _plan_prefills(
        self, pieces: list[Piece], budget: int, ends: Mapping[SequenceState, int] = MappingProxyType({})
    ) -> int:
        """Add pieces of running sequences, of at most ``budget`` tokens. Returns what is left of it.

        Args:
            ends: where the pieces in flight end; what is before that counts as computed.
        """
        for state in self._running:
            start = ends.get(state, state.computed)
            if state.prefilling and budget > 0 and start < len(state.token_ids):
                pieces.append(Piece.of(state, budget, start))
                budget -= pieces[-1].length
        return budget

    def _admit(self, pieces: list[Piece], budget: int, under_way: Collection[bytes] = ()) -> None:
        """Add pieces of requests that wait. One that will find a block of ``under_way`` in the cache waits for it."""
        while self._waiting and self.running < self._limits.max_num_seqs and budget > 0:
            state = self._waiting.first
            matched = self._prefixes.match(state)
            if under_way and self._prefixes.next_name(state, len(matched)) in under_way:
                break
            new = self.pool.blocks_for(len(state.token_ids)) - len(matched)
            if not self.pool.fits(matched, new + reserve(self.pool, self._running)):
                break  # a small prompt must not overtake, or long ones would wait for ever
            self._start(state, matched, new)
            pieces.append(Piece.of(state, budget))
            budget -= pieces[-1].length

    def _start(self, state: SequenceState, matched: Sequence[int], new: int) -> None:
        self._waiting.start(state)
        if self._prefixes.looks_up(state):
            self.pool.count_lookup(len(state.token_ids), matched)
        state.blocks = self.pool.take(matched, new)
        self._prefixes.start(state, len(matched))
        if not state.preempted:
            state.cached_tokens = min(state.computed, state.request.prompt_len)
            state.began_at = self._timer()
            self.waits.append(state.began_at - state.came_at)
        self._admissions += 1
        state.admission = self._admissions
        if self._traces is not None:
            self._traces.admitted(state)
        self._decodes = ()
        insort(self._running, state, key=SequenceState.running_key)

    def _complete_decodes(self, decodes: Sequence[SequenceState], outcomes: Sequence[Outcome]) -> list[int]:
        """Do :meth:`complete` for decodes, in one loop: there are hundreds and the device waits."""
        to_zero: list[int] = []
        block_size, events = self.pool.block_size, self._events
        self.counters.decode_tokens += len(decodes)
        for state, outcome in zip(decodes, outcomes, strict=True):
            if outcome.error is not None or not state.blocks:
                self.counters.decode_tokens -= 1
                to_zero += self._fail(state, outcome.error)
                continue
            state.computed += 1
            if not state.computed % block_size:
                self._prefixes.publish(state)
            assert outcome.token_id is not None
            event = state.take(outcome.token_id, outcome.logprob)
            events.append(event)
            if event.finish is not None:
                self._drop(state)
        return to_zero

    def _complete_chain(self, chain: Piece, outcome: Outcome) -> list[int]:
        """Do :meth:`complete` for a sequence with drafts: take what was drawn as far as the drafts were accepted, or to
        what ends the sequence. Slots of the other rows are overwritten by what comes instead."""
        state, counters = chain.state, self.counters
        counters.chains += 1
        counters.draft_tokens += len(chain.drafts)
        for number, drawn in enumerate((outcome, *outcome.further)):
            if drawn.error is not None:
                return self._fail(state, drawn.error)
            assert drawn.token_id is not None
            counters.decode_tokens += 1
            counters.accepted_tokens += number > 0  # the first token was not drafted
            self._events.append(state.take(drawn.token_id, drawn.logprob))
            if self._events[-1].finish is not None:
                break
        state.computed = len(state.token_ids) - 1
        self._prefixes.publish(state)
        if self._events[-1].finish is not None:
            self._drop(state)
        return []

    def _advance(self, piece: Piece, outcome: Outcome) -> None:
        state = piece.state
        state.computed = piece.end
        if outcome.scores is not None:
            self._events += state.score(outcome.scores)
        self._prefixes.publish(state)
        if state.prefilling:
            self.counters.prefill_tokens += piece.length
            state.prefilling = piece.end < len(state.token_ids)
            self.counters.prefill_chunks += state.prefilling
        if piece.draws:
            assert outcome.token_id is not None
            self.counters.decode_tokens += 1
            if state.began_at:
                self.prefills.append(self._timer() - state.began_at)
                state.began_at = 0.0
            self._events.append(state.take(outcome.token_id, outcome.logprob))
            if self._events[-1].finish is not None:
                self._drop(state)
        elif not state.prefilling:
            self._end(state, "length")

    def _fail(self, state: SequenceState, error: RequestError | None) -> list[int]:
        """End ``state``, unless it has ended, and forget what it computed. Returns its blocks that no other holds."""
        if not (blocks := state.blocks):
            return self._held_back.free(state, failed=error is not None)
        self._end(state, "error", error)
        return self._held_back.forget(state, blocks)

    def _end(self, state: SequenceState, finish: FinishReason, error: RequestError | None = None) -> None:
        self._drop(state)
        self._events.append(state.event(state.generated, finish=finish, error=error))

    def _drop(self, state: SequenceState) -> None:
        """Remove ``state`` from all lists and free its blocks."""
        del self._held[state.request.id]
        self._decodes = ()
        if self._drafting is not None:
            self._drafting.forget(state)
        if state.blocks:
            self._running.remove(state)
        else:
            self._waiting.remove(state)  # nothing to do for a request refused on arrival
        self._held_back.release(state)
        state.blocks, state.published = [], 0
