"""Bounds on one request and on the memory of all answers. No I/O.

:class:`Budget` bounds tokens that wait in the queue and log-probabilities in an answer; :class:`Holdings` bounds the
memory of answers, by tenant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.errors import InvalidRequest, WorkLimited
from services.gateway.job import Job
from services.messages import SCORES_PER_TOKEN, SamplingParams

MAX_SCORES = 4_000_000
"""Log-probabilities in one answer. One takes 8 bytes here and about 50 as JSON: 32 and 200 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a request asks for: prompts of these ``lengths``, ``n`` choices of each. With ``echo`` log-probabilities of
    prompts count, too, if any are asked for."""

    lengths: Sequence[int]
    n: int
    logprobs: int | None
    echo: bool

    def scores(self, max_tokens: int) -> int:
        """Returns the maximum of log-probabilities in the answer. A prompt is scored once for all of its choices."""
        others = self._scores(max_tokens, 0, echo=False) * (self.n - 1) * len(self.lengths)
        return others + sum(self._scores(max_tokens, length, echo=self.echo) for length in self.lengths)

    def cost(self, max_tokens: int) -> int:
        """Returns the tokens that the queue charges for all sequences together."""
        tokens = self.n * (sum(self.lengths) + len(self.lengths) * max_tokens)
        other = _charged(self._scores(max_tokens, 0, echo=False)) * (self.n - 1) * len(self.lengths)
        firsts = sum(_charged(self._scores(max_tokens, length, echo=self.echo)) for length in self.lengths)
        return tokens + other + firsts

    def _scores(self, max_tokens: int, length: int, *, echo: bool) -> int:
        params = SamplingParams(
            max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=self.logprobs if echo else None
        )
        return params.scores(length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The bounds on one request. ``tokens`` is the bound on all requests in the queue together."""

    tokens: int
    scores: int = MAX_SCORES

    def fits(self, demand: Demand, max_tokens: int) -> bool:
        return demand.scores(max_tokens) <= self.scores and demand.cost(max_tokens) <= self.tokens

    def check(self, demand: Demand, max_tokens: int) -> None:
        """Raises InvalidRequest for a request that could never be served."""
        scores, cost = demand.scores(max_tokens), demand.cost(max_tokens)
        if scores > self.scores:
            raise InvalidRequest(
                f"The answer would have {scores} log-probabilities; the maximum is {self.scores}.",
                hint="Lower logprobs, max_tokens or n, or send fewer or shorter prompts.",
                param="logprobs",
            )
        if cost > self.tokens:
            raise InvalidRequest(
                f"The request needs {cost} tokens (prompts and max_tokens, times n); the queue holds {self.tokens}.",
                hint="Lower max_tokens or n, send fewer prompts, or raise --max-queued-tokens.",
                param="max_tokens",
            )

    def largest_max_tokens(self, demand: Demand, room: int) -> int:
        """Returns the largest ``max_tokens`` up to ``room`` that fits; 1 if none does, which :meth:`check` refuses."""
        low, high = 1, max(1, room)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(demand, middle):
                low = middle
            else:
                high = middle - 1
        return low


def _charged(scores: int) -> int:
    return -(-scores // SCORES_PER_TOKEN)


JOB_BYTES, CHOICE_BYTES = 3_000, 4_000
"""About how much a job without tokens takes, and how much each of its choices adds."""
_RETRY_S = 2.0


@dataclass(slots=True)
class _Tenant:
    """What one tenant holds. ``jobs`` are the jobs that could be ended, by :func:`id`."""

    held: int = 0
    jobs: dict[int, weakref.ref[Job]] = field(default_factory=dict)

    def victims(self, size: Callable[[Job], int]) -> Iterator[Job]:
        """Returns the tenant's jobs in the order to end them: first those that nobody reads, then the largest."""
        found = [job for job in (ref() for ref in self.jobs.values()) if job is not None]
        return iter(sorted(found, key=lambda job: (job.read, -size(job))))


class Loan:
    """Memory that counts for a tenant until the block ends. ``size`` is in bytes."""

    def __init__(self, add: Callable[[str, int], None], tenant: str) -> None:
        self.size = 0
        self._add = add
        self._tenant = tenant

    def grow(self, size: int) -> None:
        self.size += size
        self._add(self._tenant, size)

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self._add(self._tenant, -self.size)


class Holdings:
    """The memory of all answers of a gateway, up to ``limit`` bytes. A job counts for as long as it is referenced."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._tenants: dict[str, _Tenant] = {}
        self._sizes: dict[int, int] = {}

    def open(self, job: Job) -> None:
        size = JOB_BYTES + job.prompt_bytes + CHOICE_BYTES * len(job.choices) + job.nbytes
        self._sizes[id(job)] = size
        self._add(job.tenant, size)
        self._tenants[job.tenant].jobs[id(job)] = weakref.ref(job)
        weakref.finalize(job, self._close, id(job), job.tenant)

    def grow(self, job: Job, size: int) -> None:
        """Counts ``size`` more bytes for ``job``."""
        self._sizes[id(job)] += size
        self._add(job.tenant, size)

    def size(self, job: Job) -> int:
        return self._sizes[id(job)]

    def lend(self, tenant: str) -> Loan:
        """Counts memory of an answer of ``tenant`` before there is a job."""
        return Loan(self._add, tenant)

    def check(self, tenant: str) -> None:
        """Raises WorkLimited where more than half of the memory is taken and ``tenant`` has over an equal share of it.

        A tenant below its share is never refused: answers of tenants above theirs give way.
        """
        held = self._tenants[tenant].held if tenant in self._tenants else 0
        share = self.limit / max(1, len(self._tenants) + (held == 0))
        if self.total > self.limit / 2 and held > share:
            raise WorkLimited(
                f"Answers of this key take {held >> 20} MiB of this gateway's memory.",
                hint="Read those under way first, or ask for fewer log-probabilities.",
                retry_after_s=_RETRY_S,
            )

    @property
    def full(self) -> bool:
        return self.total > self.limit

    def excess(self) -> list[Job]:
        """Returns the jobs that have to end so that the others fit, each of the tenant that holds the maximum at that
        point. A tenant within its share loses none."""
        jobs: list[Job] = []
        over, held = self.total - self.limit, {name: tenant.held for name, tenant in self._tenants.items()}
        share = self.limit / max(1, len(held))
        victims: dict[str, Iterator[Job]] = {}
        while over > 0 and held and held[name := max(held, key=held.__getitem__)] > share:
            if name not in victims:
                victims[name] = self._tenants[name].victims(self.size)
            job = next(victims[name], None)
            if job is None:
                del held[name]  # its remaining memory is about to be freed
                continue
            jobs.append(job)
            over -= self.size(job)
            held[name] -= self.size(job)
        return jobs

    def dropped(self, job: Job, size: int) -> None:
        """Notes that ``job`` was ended to make room and freed ``size`` bytes; its readers free the rest."""
        self.grow(job, -size)
        self._tenants[job.tenant].jobs.pop(id(job), None)

    def _add(self, tenant: str, size: int) -> None:
        self.total += size
        found = self._tenants.setdefault(tenant, _Tenant())
        found.held += size
        if not found.held:
            del self._tenants[tenant]

    def _close(self, number: int, tenant: str) -> None:
        self._tenants[tenant].jobs.pop(number, None)
        self._add(tenant, -self._sizes.pop(number))
