"""The log line of each HTTP request. In: what the guard, the routes and the answers note of it. Out: the line's fields.

A :class:`Note` lies in the request's ASGI scope while it is served. The fields of a line are listed in docs/api.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from services.errors import RequestError
from services.gateway.job import Job
from services.request_ids import RequestIds

_NOTE = "expertmesh.note"
_MAX_PATH = 512  # characters; a path may have 64 Ki of them
_MAX_WHY = 200  # characters; some errors repeat what the client sent

Fields = dict[str, object]


@dataclass(slots=True)
class Note:
    """What is known of a request so far. ``completion`` is the id of its answer, ``error`` the one it was answered
    with, ``trace_id`` that of its trace, if it has one."""

    ids: RequestIds
    tenant: str | None = None
    model: str | None = None
    completion: str | None = None
    job: Job | None = None
    error: RequestError | None = None
    trace_id: str | None = None

    def under(self, scope: Scope) -> None:
        """Makes the note known to all who serve the request ``scope``."""
        scope[_NOTE] = self

    def fields(self, scope: Scope, *, status: int, seconds: float) -> Fields:
        """Returns the fields of the request's log line; those that are None say nothing and are left out."""
        error = self.error or (self.job.error if self.job else None)
        fields: Fields = {
            "trace_id": self.trace_id,
            "method": scope["method"],
            "path": scope["path"][:_MAX_PATH],
            "status": status,
            "ms": round(seconds * 1e3, 1),
            "tenant": self.tenant,
            "model": self.model,
            "completion": self.completion,
            **(_of_job(self.job) if self.job else {}),
            "error": error.code if error else None,
            "param": error.param if error else None,
            "why": error.message[:_MAX_WHY] if error else None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def note_of(scope: Scope) -> Note:
    """Returns the note of the request ``scope``."""
    note: Note = scope[_NOTE]
    return note


def note_error(scope: Scope, error: RequestError) -> None:
    """Notes what the request ``scope`` is answered with, unless it is refused before it has a note."""
    if _NOTE in scope:
        note_of(scope).error = error


def _of_job(job: Job) -> Fields:
    """Returns what the job adds: tokens, times in ms since it came, and how its choices ended. A prompt counts once."""
    choices = job.choices
    first_at = min((choice.first_at for choice in choices if choice.first_at is not None), default=None)
    started = [choice for choice in choices if choice.started]
    return {
        "prompt_tokens": sum(len(choice.prompt) for choice in choices[:: job.n]),
        "completion_tokens": sum(len(choice.generated) for choice in choices),
        "queue_ms": max((choice.queued_ms for choice in started), default=0) or None,  # 0 also of an older worker
        "ttft_ms": None if first_at is None else round((first_at - job.arrived) * 1e3, 1),
        "attempts": max(choice.request.attempt for choice in choices),
        "finish": ",".join(sorted({choice.finish for choice in choices if choice.finish})) or None,
    }
