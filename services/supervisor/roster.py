"""Which workers settings ask for. Pure."""

from __future__ import annotations

from services.config import ATTENTION, COLOCATED, EXPERTS, Role, Settings


def computing(settings: Settings) -> dict[Role, list[str]]:
    """Names of the workers of each role. One attention worker alone has no number."""
    if settings.colocated_workers:
        return {ATTENTION: [], COLOCATED: _numbered(COLOCATED, settings.colocated_workers), EXPERTS: []}
    attention = settings.attention_workers
    return {
        ATTENTION: [ATTENTION] if attention == 1 else _numbered(ATTENTION, attention),
        COLOCATED: [],
        EXPERTS: _numbered(EXPERTS, settings.expert_workers),
    }


def _numbered(role: Role, count: int) -> list[str]:
    return [f"{role}-{number}" for number in range(count)]
