"""Options of `vllm serve`: those that mean the same here under another name, and what to say instead of the others.

The command line alone knows these names; the environment and the file have the settings' own.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "kv_blocks",
}
"""Name in vLLM -> the setting that means the same."""

_QUANTISATION = "leave it out. config.json says how a checkpoint is quantised; others are served as they are."
_NO_TOOLS = "tool calling is not supported: requests with tools are refused (docs/api.md)."
_NO_SCHEMAS = "structured output is not supported: requests with response_format are refused."
_NO_ADAPTERS = "LoRA adapters are not supported. Merge the adapter into the checkpoint."
_SPECULATION = "use --speculative-config, which has a model and a number of tokens (docs/speculation.md)."
_NO_REASONING = "it is not supported: reasoning stays in the answer's text."
_EAGER = "leave it out. CUDA graphs are used on GPUs; --enforce-eager switches them off."
_ONE_CODE = "a checkpoint's code is never run: families are built in (docs/models.md lists them)."
_SPLIT = (
    "layers and tensors are not split over GPUs. If the model does not fit one GPU, spread its experts: "
    "--layout colocated --workers N, or --layout disaggregated --expert-workers N (docs/layouts.md)."
)
_REPLICAS = (
    "use --workers N: each has a full copy of attention, with --layout local of the whole model (docs/layouts.md)."
)
_EXPERTS = "use --layout disaggregated, colocated or lockstep, which spread the experts (docs/layouts.md)."
_BALANCE = "leave it out. With --layout disaggregated or colocated, experts are rebalanced by load (docs/layouts.md)."
_NO_OFFLOAD = "KV blocks and weights are not offloaded to the CPU. When blocks run out, sequences are recomputed."
_IN_FOLDER = "leave it out. The tokenizer is read from the checkpoint's folder."
_TLS = "the server speaks plain HTTP. Terminate TLS in a proxy or an Ingress in front of it (docs/security.md)."
_HUB = "set HF_HOME or HF_HUB_CACHE: models are downloaded into the hub's own cache."
_IMAGES = "models take text only."

POINTERS: Mapping[str, str] = {
    "tensor_parallel_size": _SPLIT,
    "pipeline_parallel_size": _SPLIT,
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "api_server_count": "`serve` starts one gateway. With --redis-url, start more with `expertmesh gateway`.",
    "enable_expert_parallel": _EXPERTS,
    "all2all_backend": "use --layout, --fabric-lane and --fabric-shared, which say how rows travel (docs/layouts.md).",
    "enable_eplb": _BALANCE,
    "num_redundant_experts": _BALANCE,
    "distributed_executor_backend": "leave it out. Workers are separate processes, set by --layout and --workers.",
    "kv_cache_memory_bytes": "set it in GiB: --kv-memory-gib X.",
    "swap_space": _NO_OFFLOAD,
    "cpu_offload_gb": _NO_OFFLOAD,
    "quantization": _QUANTISATION,
    "kv_cache_dtype": "leave it out. The KV cache has the dtype of the activations (--dtype).",
    "load_format": "leave it out. Weights are read from *.safetensors files.",
    "trust_remote_code": f"leave it out; {_ONE_CODE}",
    "tokenizer": _IN_FOLDER,
    "tokenizer_mode": _IN_FOLDER,
    "tokenizer_revision": "use --revision R: weights and tokenizer are of one revision.",
    "generation_config": "leave it out. Only the end-of-sequence tokens are read from generation_config.json.",
    "hf_overrides": "change config.json in a copy of the checkpoint.",
    "rope_scaling": "change rope_scaling of config.json in a copy of the checkpoint.",
    "chat_template": "put it into the checkpoint's folder, as chat_template.jinja.",
    "seed": "leave it out. Requests bring their own seed, or the gateway draws one.",
    "enable_auto_tool_choice": _NO_TOOLS,
    "tool_call_parser": _NO_TOOLS,
    "reasoning_parser": _NO_REASONING,
    "enable_reasoning": _NO_REASONING,
    "guided_decoding_backend": _NO_SCHEMAS,
    "speculative_model": _SPECULATION,
    "num_speculative_tokens": _SPECULATION,
    "enable_lora": _NO_ADAPTERS,
    "lora_modules": _NO_ADAPTERS,
    "max_loras": _NO_ADAPTERS,
    "max_lora_rank": _NO_ADAPTERS,
    "enable_chunked_prefill": "leave it out. Long prompts are always split over several steps.",
    "max_num_partial_prefills": "leave it out. A step takes chunks of prompts up to --max-num-batched-tokens.",
    "compilation_config": _EAGER,
    "max_seq_len_to_capture": _EAGER,
    "scheduling_policy": "leave it out. Requests may have a priority; within a priority, tenants take turns.",
    "limit_mm_per_prompt": _IMAGES,
    "task": "models only generate text; embeddings are not offered.",
    "runner": "models only generate text; embeddings are not offered.",
    "max_logprobs": "leave it out. The bound is fixed: requests for more are refused.",
    "download_dir": _HUB,
    "hf_token": "set the variable HF_TOKEN.",
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "root_path": "have a proxy in front of the server strip the prefix from paths.",
    "disable_log_requests": "use --log-level warning: each request is one line at info.",
    "enable_log_requests": "leave it out. Each request is one line in the log.",
    "disable_log_stats": "leave it out. Statistics are only at /metrics.",
    "override_generation_config": "leave it out. Requests bring their own sampling parameters.",
    "structured_outputs_config": _NO_SCHEMAS,
    "enable_log_outputs": "it is not supported. Answers are never logged.",
    "disable_uvicorn_access_log": "use --log-level warning: each request is one line at info.",
    "allowed_methods": "leave it out. The origins of --allowed-origins may use all methods of the API.",
    "allowed_headers": "leave it out. The origins of --allowed-origins may send all headers.",
    "allow_credentials": "leave it out. Clients send their key in a header, never cookies.",
    "response_role": "the role of an answer is always assistant.",
}
"""Name in vLLM -> what to use here, or that it is not supported."""

SHORT: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
    "-O": "compilation_config",
}
"""Short options of vLLM -> their long names."""


def pointer(word: str) -> str | None:
    """Returns what to use instead of ``word``, an option as it was written; None if vLLM has none of that name."""
    name = SHORT.get(word[:2] if word.startswith("-O") else word) or word.removeprefix("--").replace("-", "_")
    return POINTERS.get(name) or POINTERS.get(name.removeprefix("no_"))
