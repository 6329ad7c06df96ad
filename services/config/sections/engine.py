"""Section: the engine of an attention worker."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.config.fields import ATTENTION, COMPUTING, SCHEDULER, setting
from services.prefix import PrefixScope


class EngineSettings(BaseModel):
    """The batch, the KV blocks, and how steps are computed."""

    max_num_seqs: int = setting(64, "sequences in one batch", roles=(ATTENTION,), ge=1, le=65_536)
    max_num_batched_tokens: int = setting(512, "tokens in one step of the engine", roles=(ATTENTION,), ge=1, le=1 << 20)
    kv_blocks: int | None = setting(
        None, "KV blocks (default: from --kv-memory-gib)", roles=(ATTENTION,), hidden=True, ge=1
    )
    kv_memory_gib: float = setting(1.0, "memory for KV blocks, GiB", roles=(ATTENTION,), gt=0, le=1 << 20)
    block_size: int = setting(16, "tokens in a KV block", roles=(ATTENTION,), ge=1, le=1024)
    prefix_cache: bool = setting(True, "keep the KV blocks of finished prompts for later ones", roles=(ATTENTION,))
    prefix_cache_scope: PrefixScope = setting(
        "tenant",
        "among whom they are shared: the requests of a tenant (an API key), or all",
        roles=(SCHEDULER, ATTENTION),
    )
    enforce_eager: bool = setting(
        False,
        "launch every kernel by itself: no CUDA graphs, and no decode step ahead of the one before it",
        roles=(ATTENTION,),
    )
    overlap: Literal["auto", "on", "off"] = setting(
        "auto",
        "compute attention of half a step while the other half's rows are with expert workers; auto measures "
        "whether that is faster",
        roles=(ATTENTION,),
    )
    threads: int | None = setting(None, "CPU threads that compute (default: torch's own choice)", roles=COMPUTING, ge=1)
    layer_series: bool = setting(
        False, "metrics of each layer; without, of all together, as layer=all", roles=COMPUTING
    )
