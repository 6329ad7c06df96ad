"""Settings of earlier releases that were removed, each with a sentence that says what to write instead.

The command line, the environment, the file and the chart (by helm/generate.py) refuse such a name with its sentence.
"""

from __future__ import annotations

from collections.abc import Mapping

_ALWAYS = "Leave it out:"

RENAMED: Mapping[str, str] = {
    "experts": "Use --layout local, --layout disaggregated (was tcp) or --layout lockstep (was mesh).",
    "colocated_by": "Use --layout colocated (was seats) or --layout lockstep (was mesh).",
    "colocated_workers": "Use --layout colocated --workers N.",
    "attention_workers": "Use --workers N.",
    "ranks": "Use --workers N.",
    "fewest_replicas": "Use --min-replicas N.",
    "most_replicas": "Use --max-replicas N.",
    "fewest_attention": "Use --min-attention N.",
    "most_attention": "Use --max-attention N.",
    "fewest_gateways": "Use --min-gateways N.",
    "most_gateways": "Use --max-gateways N.",
    "experts_patience": "Use --experts-timeout X.",
    "mesh_address": "Use --lockstep-address HOST:PORT.",
    "mesh_exchange": "Use --lockstep-exchange auto, flat or hierarchical.",
    "mesh_timeout": "Use --experts-timeout X: ranks wait for one another that long, too.",
    "fabric_teams": "Use --joint-steps auto.",
    "cuda_graphs": "Use --enforce-eager if it was off; auto needs nothing.",
    "lookahead": "Use --enforce-eager if it was off; auto needs nothing.",
    "gpu": "Use --device cuda:N for one worker; `serve` and `workers` give each a GPU of CUDA_VISIBLE_DEVICES.",
    "kubernetes": "Use --kubernetes-selector alone: it turns the watch on.",
    "step_timeout": f"{_ALWAYS} a step counts as stuck after ten times --experts-timeout, at least a minute.",
    "gateway_lease": f"{_ALWAYS} it is five times --lease.",
    "chunked_prefill": f"{_ALWAYS} long prompts are always split over several steps.",
    "fabric_sums": f"{_ALWAYS} expert workers add outputs up for float16 and bfloat16, and not for float32.",
    "relay_pairs": f"{_ALWAYS} two nodes have as many relays as they have ranks.",
    "fair_quantum": f"{_ALWAYS} it is 1024 tokens.",
    "idempotency_ttl": f"{_ALWAYS} an Idempotency-Key is remembered for an hour.",
    "publish_buffer_tokens": f"{_ALWAYS} 65,536 computed tokens are held while Redis is away.",
    "fabric_inbox_rows": f"{_ALWAYS} 65,536 rows may wait at an expert worker.",
    "kv_overcommit": f"{_ALWAYS} a worker is assigned one and a half times the tokens that its KV blocks hold.",
}
