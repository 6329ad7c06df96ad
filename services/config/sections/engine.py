"""Section: the engine of an attention worker."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.config.fields import ATTENTION, COMPUTING, SCHEDULER, setting
from services.prefix import PrefixScope


class EngineSettings(BaseModel):
    """The batch, the KV blocks, and how steps are computed."""

    max_num_seqs: int = setting(
        64,
        "maximum number of sequences in the batch of an attention worker",
        common=True,
        roles=(ATTENTION,),
        ge=1,
        le=65_536,
    )
    max_num_batched_tokens: int = setting(
        512,
        "maximum number of tokens in one step of an attention worker, prefill and decode together",
        common=True,
        roles=(ATTENTION,),
        ge=1,
        le=1 << 20,
    )
    kv_blocks: int | None = setting(
        None,
        "number of KV blocks (default: as many as fit into --kv-memory-gib)",
        roles=(ATTENTION,),
        hidden=True,
        ge=1,
    )
    kv_memory_gib: float = setting(
        1.0,
        "memory for the KV cache of each attention worker, in GiB",
        common=True,
        roles=(ATTENTION,),
        gt=0,
        le=1 << 20,
    )
    block_size: int = setting(16, "number of tokens in a KV block", roles=(ATTENTION,), ge=1, le=1024)
    prefix_cache: bool = setting(
        True,
        "keep the KV blocks of finished prompts and reuse them for prompts with the same beginning",
        roles=(ATTENTION,),
    )
    prefix_cache_scope: PrefixScope = setting(
        "tenant",
        "whose requests share cached prefixes: those of one tenant (an API key), or all",
        roles=(SCHEDULER, ATTENTION),
    )
    enforce_eager: bool = setting(
        False,
        "run without CUDA graphs, and launch each decode step only after the previous one has finished",
        roles=(ATTENTION,),
    )
    overlap: Literal["auto", "on", "off"] = setting(
        "auto",
        "split steps in two and compute attention of one half while expert workers compute the other (ping-pong); "
        "auto measures whether that is faster",
        roles=(ATTENTION,),
    )
    threads: int | None = setting(
        None, "number of CPU threads to compute with (default: chosen by torch)", roles=COMPUTING, ge=1
    )
