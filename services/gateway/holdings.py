"""How much memory answers take, by tenant: those under way, those whose clients read slowly, those kept for a retry.

In: jobs, and by how many bytes they grew. Out: whether a tenant may have more, and which job is too much.
"""

from __future__ import annotations

import weakref
from collections import Counter

from services.errors import Overloaded
from services.gateway.job import Job

JOB_BYTES, CHOICE_BYTES = 3_000, 4_000
"""About what a job takes that has no tokens yet, and what each of its choices adds."""
_RETRY_S = 2.0


class Holdings:
    """Of one gateway, which has ``limit`` bytes for them. A job counts for as long as anybody holds it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._tenants: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}

    def open(self, job: Job) -> None:
        size = JOB_BYTES + job.prompt_bytes + sum(CHOICE_BYTES + choice.nbytes for choice in job.choices)
        self._sizes[id(job)] = size
        self._add(job.tenant, size)
        weakref.finalize(job, self._close, id(job), job.tenant)

    def grow(self, job: Job, size: int) -> None:
        """``job`` takes that many bytes more."""
        self._sizes[id(job)] += size
        self._add(job.tenant, size)

    def size(self, job: Job) -> int:
        return self._sizes[id(job)]

    def check(self, tenant: str) -> None:
        """Raises Overloaded where ``tenant`` may have no more: half is for whoever comes, all of it in equal shares."""
        held = self._tenants[tenant]
        share = self.limit / max(1, len(self._tenants) + (held == 0))
        if self.total >= self.limit or (self.total > self.limit / 2 and held > share):
            raise Overloaded(
                f"Answers of this key take {held >> 20} MiB of this gateway's memory.",
                hint="Read those under way first, or ask for fewer log-probabilities.",
                retry_after_s=_RETRY_S,
            )

    @property
    def full(self) -> bool:
        return self.total > self.limit

    def excess(self, jobs: list[Job]) -> Job:
        """Which of ``jobs`` has to end where all is taken: the largest of the tenant that holds most of them."""
        held: Counter[str] = Counter()
        for job in jobs:
            held[job.tenant] += self.size(job)
        ((tenant, _),) = held.most_common(1)
        return max((job for job in jobs if job.tenant == tenant), key=self.size)

    def _add(self, tenant: str, size: int) -> None:
        self.total += size
        self._tenants[tenant] += size

    def _close(self, number: int, tenant: str) -> None:
        size = self._sizes.pop(number)
        self.total -= size
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]
