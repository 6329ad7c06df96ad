"""Settings of earlier releases that were removed, each with a sentence that says what to write instead.

The command line, the environment, the file and the chart (by helm/generate.py) refuse such a name with its sentence.
"""

from __future__ import annotations

from collections.abc import Mapping

_ALWAYS = "Leave it out:"

RENAMED: Mapping[str, str] = {
    "experts": "Say --layout local, --layout disaggregated (it was tcp) or --layout lockstep (it was mesh).",
    "colocated_by": "Say --layout colocated (it was seats) or --layout lockstep (it was mesh).",
    "colocated_workers": "Say --layout colocated --workers N.",
    "attention_workers": "Say --workers N.",
    "ranks": "Say --workers N.",
    "fewest_replicas": "Say --min-replicas N.",
    "most_replicas": "Say --max-replicas N.",
    "fewest_attention": "Say --min-attention N.",
    "most_attention": "Say --max-attention N.",
    "fewest_gateways": "Say --min-gateways N.",
    "most_gateways": "Say --max-gateways N.",
    "experts_patience": "Say --experts-timeout X.",
    "mesh_address": "Say --lockstep-address HOST:PORT.",
    "mesh_exchange": "Say --lockstep-exchange auto, flat or hierarchical.",
    "mesh_timeout": "Say --experts-timeout X: for so long ranks wait for one another, too.",
    "fabric_teams": "Say --joint-steps auto.",
    "cuda_graphs": "Say --enforce-eager where it was off; auto needs nothing.",
    "lookahead": "Say --enforce-eager where it was off; auto needs nothing.",
    "gpu": "Say --device cuda:N for one worker; `serve` and `workers` give each a GPU of CUDA_VISIBLE_DEVICES.",
    "kubernetes": "Say --kubernetes-selector alone: where it is given, Kubernetes is asked.",
    "step_timeout": f"{_ALWAYS} a step counts as stuck after ten times --experts-timeout, and a minute at least.",
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
