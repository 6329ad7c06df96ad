"""Section: the engine of an attention worker."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, field_validator

from services.config.fields import ATTENTION, COMPUTING, SCHEDULER, setting
from services.config.speculation import SpeculativeConfig
from services.prefix import PrefixScope


class EngineSettings(BaseModel):
    """The batch, the KV blocks, and how steps are computed."""

    max_num_seqs: int | None = setting(
        None,
        "maximum number of sequences in the batch of an attention worker (default: 64; on a GPU up to 512, by its "
        "memory)",
        common=True,
        roles=(ATTENTION,),
        ge=1,
        le=65_536,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum number of tokens in one step of an attention worker, prefill and decode together (default: 512; on a "
        "GPU by its memory, and beside decodes as many as double the time of a step)",
        common=True,
        roles=(ATTENTION,),
        ge=1,
        le=1 << 20,
    )
    kv_blocks: int | None = setting(
        None,
        "number of KV blocks (default: as many as fit into the memory for the KV cache)",
        roles=(ATTENTION,),
        hidden=True,
        ge=1,
    )
    kv_memory_gib: float | None = setting(
        None,
        "memory for the KV cache of each attention worker, in GiB (default: 1; on a GPU what --gpu-memory-utilization "
        "leaves)",
        common=True,
        roles=(ATTENTION,),
        gt=0,
        le=1 << 20,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of a GPU's memory that an attention worker may fill: weights, activations, CUDA graphs, and with the "
        "rest the KV cache. Workers that `serve` or `workers` puts on one GPU divide it",
        common=True,
        roles=(ATTENTION,),
        gt=0,
        le=1,
    )
    gpu_workers: int = setting(
        1,
        "number of attention workers that divide this worker's GPU (set by `serve` and `workers`)",
        roles=(ATTENTION,),
        hidden=True,
        ge=1,
        le=4096,
    )
    gpu_reserved_gib: float = setting(
        0.0,
        "memory that expert workers take of this worker's GPU, in GiB (set by `serve` and `workers`)",
        roles=(ATTENTION,),
        hidden=True,
        ge=0,
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
    speculative_config: str | None = setting(
        None,
        'draft tokens and verify several in a step, where that is measured to be faster: {"method": "ngram"} drafts '
        'what followed the same tokens earlier in prompt and answer, {"method": "draft_model", "model": "DIR"} what a '
        "smaller model with the same tokens says (docs/speculation.md)",
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

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None: they are not."""
        text = self.speculative_config
        return None if text is None else SpeculativeConfig.model_validate_json(text)

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _is_known(cls, value: object) -> object:
        """Refuses what cannot be drafted by. A file may have a mapping where the command line has text."""
        text = json.dumps(value) if isinstance(value, dict) else value
        if isinstance(text, str):
            SpeculativeConfig.model_validate_json(text)
        return text
