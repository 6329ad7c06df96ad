"""How much memory answers take, by tenant: those under way, those whose clients read slowly, those kept for a retry.

In: jobs, and by how many bytes they grew. Out: whether a tenant may have more, and which jobs are too much.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from services.errors import WorkLimited
from services.gateway.job import Job

JOB_BYTES, CHOICE_BYTES = 3_000, 4_000
"""About what a job takes that has no tokens yet, and what each of its choices adds."""
_RETRY_S = 2.0


@dataclass(slots=True)
class _Tenant:
    """What is held of one tenant. ``jobs`` are those that could be ended, by :func:`id`."""

    held: int = 0
    jobs: dict[int, weakref.ref[Job]] = field(default_factory=dict)

    def victims(self, size: Callable[[Job], int]) -> Iterator[Job]:
        """Its jobs in the order in which they have to go: what is kept for nobody yet, then the largest."""
        found = [job for job in (ref() for ref in self.jobs.values()) if job is not None]
        return iter(sorted(found, key=lambda job: (job.read, -size(job))))


class Loan:
    """So much for a tenant, until the block ends. ``size`` in bytes."""

    def __init__(self, add: Callable[[str, int], None], tenant: str) -> None:
        self.size = 0
        self._add = add
        self._tenant = tenant

    def grow(self, size: int) -> None:
        self.size += size
        self._add(self._tenant, size)

    def __enter__(self) -> Loan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._add(self._tenant, -self.size)


class Holdings:
    """Of one gateway, which has ``limit`` bytes for them. A job counts for as long as anybody holds it."""

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
        """``job`` takes that many bytes more."""
        self._sizes[id(job)] += size
        self._add(job.tenant, size)

    def size(self, job: Job) -> int:
        return self._sizes[id(job)]

    def lend(self, tenant: str) -> Loan:
        """For what an answer of ``tenant`` takes before there is a job."""
        return Loan(self._add, tenant)

    def check(self, tenant: str) -> None:
        """Raises WorkLimited where ``tenant`` may have no more: half is for whoever comes, all of it in equal shares.

        Who has less than a share may come in any case: what others have beyond theirs gives way.
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
        """Which jobs have to end so that the others fit: each time one of the tenant that holds most of all. Nothing of
        a tenant that has no more than its share is among them."""
        jobs: list[Job] = []
        over, held = self.total - self.limit, {name: tenant.held for name, tenant in self._tenants.items()}
        share = self.limit / max(1, len(held))
        victims: dict[str, Iterator[Job]] = {}
        while over > 0 and held and held[name := max(held, key=held.__getitem__)] > share:
            if name not in victims:
                victims[name] = self._tenants[name].victims(self.size)
            job = next(victims[name], None)
            if job is None:
                del held[name]  # all that is left of it is about to go
                continue
            jobs.append(job)
            over -= self.size(job)
            held[name] -= self.size(job)
        return jobs

    def dropped(self, job: Job, size: int) -> None:
        """``job`` has ended for want of room, and let go of ``size`` bytes; the rest goes with its readers."""
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
