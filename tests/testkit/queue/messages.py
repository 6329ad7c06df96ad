"""Requests and workers as tests of the queue enter them."""

from __future__ import annotations

from collections.abc import Sequence

from services.messages import GenerateRequest, SamplingParams, WorkerInfo
from services.wire import WIRE


def request_of(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    tenant: str = "t",
    priority: int = 5,
    reply_to: str = "g1",
) -> GenerateRequest:
    """Holds its prompt, and nothing of what the queue sets."""
    return GenerateRequest(
        id=request_id,
        attempt=0,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_ms=0,
        priority=priority,
        tenant=tenant,
        reply_to=reply_to,
    )


def worker_of(worker_id: str, fingerprint: str = "f") -> WorkerInfo:
    return WorkerInfo(
        id=worker_id,
        model="m",
        fingerprint=fingerprint,
        kv_tokens=1,
        max_num_seqs=8,
        max_model_len=512,
        host="h",
        pid=1,
        version="0",
        wire=WIRE,
    )
