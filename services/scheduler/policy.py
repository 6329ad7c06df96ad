"""Which attention worker gets a request. Pure: worker states and requests in, a plan out; no I/O, no clock.

Among the workers that have credit for a request (:meth:`WorkerState.has_credit`) the lowest score wins:

    score = (outstanding + cost - held) / credit_tokens

``outstanding`` are tokens assigned and not ended, ``cost`` the request's prompt and everything that may follow it,
``held`` the prompt tokens that the worker probably has in its prefix cache. So affinity is worth exactly the prefill
it saves: between equal workers, one is preferred for its cache only while it is at most ``held`` tokens, which is at
most one prompt, busier than any other with credit. A shared prefix cannot pile everything onto one worker.
Equal scores go to the worker with fewer requests, then to the lower id.

What a worker holds is guessed from the requests that it got: the names of prefixes (``services.prefix``) over chunks of
``CHUNK_TOKENS``, least recently used forgotten first. A wrong guess costs a prefill, never a result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from services.messages import GenerateRequest
from services.prefix import PrefixScope, prefix_chain, prefix_root
from services.queue.scheduler_side import Claim, WorkerState

CHUNK_TOKENS = 64
MAX_CHUNKS = 128
"""Chunks of a prompt that are looked at: hashing more would cost more than the choice gains."""
REMEMBERED_CHUNKS = 65_536
HOLDERS = 4
"""Workers remembered per prefix; a prefix that everyone holds needs no affinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The worker ``worker_id`` is to get ``request``; it probably holds ``held_tokens`` of the prompt."""

    request: GenerateRequest
    worker_id: str
    held_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What becomes of claimed requests. ``hopeless`` ones are longer than any worker's context, ``waiting`` ones lack
    credit, ``deferred`` ones are suspects that no worker can run alone yet."""

    choices: Sequence[Choice]
    hopeless: Sequence[GenerateRequest]
    waiting: Sequence[GenerateRequest]
    deferred: Sequence[GenerateRequest] = ()


class PrefixMemory:
    """Bounded map from the name of a prefix to the workers that last got it. ``scope`` says who shares prefixes."""

    def __init__(
        self,
        *,
        scope: PrefixScope = "tenant",
        chunk_tokens: int = CHUNK_TOKENS,
        capacity: int = REMEMBERED_CHUNKS,
    ) -> None:
        self._scope = scope
        self._chunk_tokens = chunk_tokens
        self._capacity = capacity
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def chain(self, claim: Claim) -> list[bytes]:
        """Return the names of the prefixes of ``claim``'s prompt, shortest first."""
        root = prefix_root(self._scope, claim.request.tenant, claim.request.cache_salt)
        return list(prefix_chain(claim.head[: MAX_CHUNKS * self._chunk_tokens], self._chunk_tokens, root))

    def held(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Return the tokens of the prefix that each worker holds, for workers that hold any; a gap ends a prefix."""
        tokens: dict[str, int] = {}
        for depth, name in enumerate(chain):
            before = depth * self._chunk_tokens
            holders = [worker for worker in self._holders.get(name, ()) if tokens.get(worker, 0) == before]
            if not holders:
                break
            tokens |= dict.fromkeys(holders, before + self._chunk_tokens)
        return tokens

    def remember(self, chain: Sequence[bytes], worker_id: str) -> None:
        """Note that ``worker_id`` computes this prefix. Long prefixes are forgotten before short ones they continue."""
        for name in reversed(chain):
            others = (worker for worker in self._holders.get(name, ()) if worker != worker_id)
            self._holders[name] = (worker_id, *islice(others, HOLDERS - 1))
            self._holders.move_to_end(name)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)


class DispatchPolicy:
    """Chooses workers for a batch of claimed requests and remembers which worker got which prefix."""

    def __init__(self, memory: PrefixMemory | None = None) -> None:
        self._memory = memory or PrefixMemory()

    def plan(self, claims: Sequence[Claim], workers: Iterable[WorkerState]) -> Plan:
        """Return choices for the longest head of ``claims`` that fits the workers' credit, in order.

        The first request that has to wait for credit ends the head: if smaller requests behind it passed, it might wait
        forever, and the fair order in which they were claimed would be lost. Suspects are passed: each waits for a
        worker that gets nothing else, until that worker has no other request without a token. At most half of the
        workers are kept for suspects at a time, so that many suspects do not hold up all others.
        """
        states = {worker.info.id: worker for worker in workers}
        max_guarded = max(1, len(states) // 2)
        longest = max((worker.info.max_model_len for worker in states.values()), default=None)
        choices: list[Choice] = []
        hopeless: list[GenerateRequest] = []
        deferred: list[GenerateRequest] = []
        for position, claim in enumerate(claims):
            request = claim.request
            if longest is not None and request.max_len > longest:
                hopeless.append(request)
                continue
            full = claim.suspect and sum(worker.guarded for worker in states.values()) >= max_guarded
            choice = None if full else self._choose(claim, states.values())
            if choice is not None:
                states[choice.worker_id] = _with(states[choice.worker_id], claim)
                choices.append(choice)
            elif claim.suspect:
                deferred.append(request)
                if not full and (kept := _kept_for(request, states.values())):
                    states[kept.info.id] = replace(kept, guarded=True)
            else:
                waiting = [later.request for later in claims[position:]]
                return Plan(choices=choices, hopeless=hopeless, waiting=waiting, deferred=deferred)
        return Plan(choices=choices, hopeless=hopeless, waiting=(), deferred=deferred)

    def _choose(self, claim: Claim, workers: Iterable[WorkerState]) -> Choice | None:
        request, cost = claim.request, claim.request.cost
        able = [worker for worker in workers if _able(worker, request) and not (claim.suspect and worker.unproven)]
        if not able:
            return None
        chain = self._memory.chain(claim)
        held = self._memory.held(chain)
        best = min(able, key=lambda w: (score(w, cost, held.get(w.info.id, 0)), w.outstanding_requests, w.info.id))
        self._memory.remember(chain, best.info.id)
        return Choice(request=request, worker_id=best.info.id, held_tokens=held.get(best.info.id, 0))


def _able(worker: WorkerState, request: GenerateRequest) -> bool:
    """Say whether ``worker`` has credit and room for ``request``, and is not kept for a suspect."""
    fits = request.max_len <= worker.info.max_model_len and worker.has_credit(request.cost)
    return fits and not worker.guarded


def _kept_for(request: GenerateRequest, workers: Iterable[WorkerState]) -> WorkerState | None:
    """Return the worker that will be the first to run the suspect ``request`` alone."""
    able = [worker for worker in workers if _able(worker, request)]
    return min(able, key=lambda worker: (worker.unproven, worker.info.id), default=None)


def score(worker: WorkerState, cost: int, held_tokens: int) -> float:
    """Return the load of ``worker`` after taking the request, as a share of its credit; see the module's docstring."""
    return (worker.outstanding_tokens + cost - held_tokens) / worker.credit_tokens


def _with(worker: WorkerState, claim: Claim) -> WorkerState:
    """Return ``worker`` with one more request."""
    return replace(
        worker,
        outstanding_tokens=worker.outstanding_tokens + claim.request.cost,
        outstanding_requests=worker.outstanding_requests + 1,
        unproven=worker.unproven + 1,
        guarded=claim.suspect,
    )
