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

_NO_QUANTISATION = "it is not supported. Serve the float32, bfloat16 or float16 version of the checkpoint."
_NO_TOOLS = "tool calling is not supported: requests with tools are refused (docs/api.md)."
_NO_SCHEMAS = "structured output is not supported: requests with response_format are refused."
_NO_ADAPTERS = "LoRA adapters are not supported. Merge the adapter into the checkpoint."
_NO_SPECULATION = "speculative decoding is not supported."
_NO_REASONING = "it is not supported: what a model thinks stays in its answer's text."
_EAGER = "leave it out. CUDA graphs are used where there is a GPU; --enforce-eager switches them off."
_ONE_CODE = "code of a checkpoint is never run: families are built in (qwen3_moe, qwen2_moe, mixtral, olmoe)."
_SPLIT = (
    "layers and their tensors are not split over GPUs. Where no GPU holds the model, spread its experts: "
    "--layout colocated --workers N, or --layout disaggregated --expert-workers N (docs/layouts.md)."
)
_REPLICAS = (
    "say --workers N: each is a whole copy of attention, and with --layout local of the model (docs/layouts.md)."
)
_EXPERTS = "choose --layout disaggregated, colocated or lockstep: experts are then spread (docs/layouts.md)."
_BALANCE = "leave it out. With --layout disaggregated or colocated experts follow their load (docs/layouts.md)."
_NO_OFFLOAD = "KV blocks and weights do not move to the CPU. When blocks run out, sequences are recomputed."
_IN_FOLDER = "leave it out. tokenizer.json and tokenizer_config.json of the checkpoint's folder are used."
_TLS = "the server speaks HTTP. Put a proxy or an Ingress with the certificate before it (docs/security.md)."
_HUB = "set HF_HOME or HF_HUB_CACHE: models of the hub are downloaded into the hub's own cache."
_IMAGES = "models take text alone."

POINTERS: Mapping[str, str] = {
    "tensor_parallel_size": _SPLIT,
    "pipeline_parallel_size": _SPLIT,
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "api_server_count": "`serve` starts one gateway. With --redis-url more can be started by `expertmesh gateway`.",
    "enable_expert_parallel": _EXPERTS,
    "all2all_backend": "--layout says how rows travel, with --fabric-lane and --fabric-shared (docs/layouts.md).",
    "enable_eplb": _BALANCE,
    "num_redundant_experts": _BALANCE,
    "distributed_executor_backend": "workers are processes of their own, which --layout and --workers describe.",
    "gpu_memory_utilization": "say how much memory KV blocks get, in GiB: --kv-memory-gib X.",
    "kv_cache_memory_bytes": "say it in GiB: --kv-memory-gib X.",
    "swap_space": _NO_OFFLOAD,
    "cpu_offload_gb": _NO_OFFLOAD,
    "quantization": _NO_QUANTISATION,
    "kv_cache_dtype": "leave it out. Keys and values have the type that --dtype gives to activations.",
    "load_format": "leave it out. Weights are read from *.safetensors files.",
    "trust_remote_code": f"leave it out; {_ONE_CODE}",
    "tokenizer": _IN_FOLDER,
    "tokenizer_mode": _IN_FOLDER,
    "tokenizer_revision": "say --revision R: weights and tokenizer are of one revision.",
    "generation_config": "only the tokens that end an answer are read from the checkpoint's generation_config.json.",
    "hf_overrides": "change config.json in a copy of the checkpoint.",
    "rope_scaling": "change rope_scaling of config.json in a copy of the checkpoint.",
    "chat_template": "put it into the checkpoint's folder, as chat_template.jinja.",
    "seed": "leave it out. A request says its own seed, and the gateway draws one where it does not.",
    "enable_auto_tool_choice": _NO_TOOLS,
    "tool_call_parser": _NO_TOOLS,
    "reasoning_parser": _NO_REASONING,
    "enable_reasoning": _NO_REASONING,
    "guided_decoding_backend": _NO_SCHEMAS,
    "speculative_config": _NO_SPECULATION,
    "speculative_model": _NO_SPECULATION,
    "num_speculative_tokens": _NO_SPECULATION,
    "enable_lora": _NO_ADAPTERS,
    "lora_modules": _NO_ADAPTERS,
    "max_loras": _NO_ADAPTERS,
    "max_lora_rank": _NO_ADAPTERS,
    "enable_chunked_prefill": "leave it out. Long prompts are always split over several steps.",
    "max_num_partial_prefills": "leave it out. A step takes chunks of prompts up to --max-num-batched-tokens.",
    "compilation_config": _EAGER,
    "max_seq_len_to_capture": _EAGER,
    "scheduling_policy": "leave it out. A request may say its priority, and tenants take turns within one.",
    "limit_mm_per_prompt": _IMAGES,
    "task": "models generate text alone; embeddings are not offered.",
    "runner": "models generate text alone; embeddings are not offered.",
    "max_logprobs": "leave it out. The bound is fixed: a request that asks for more is refused.",
    "download_dir": _HUB,
    "hf_token": "set the variable HF_TOKEN.",
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "root_path": "a proxy before the server has to remove the prefix from paths.",
    "disable_log_requests": "say --log-level warning: each request is one line at info.",
    "enable_log_requests": "leave it out. Each request is one line in the log.",
    "disable_log_stats": "leave it out. Statistics are at /metrics alone.",
    "override_generation_config": "leave it out. Requests say their own sampling parameters.",
    "structured_outputs_config": _NO_SCHEMAS,
    "enable_log_outputs": "it is not supported. Answers are never logged.",
    "disable_uvicorn_access_log": "say --log-level warning: each request is one line at info.",
    "allowed_methods": "leave it out. All methods of the API are allowed to --allowed-origins.",
    "allowed_headers": "leave it out. All headers are allowed to --allowed-origins.",
    "allow_credentials": "leave it out. Clients send a header with their key, never cookies.",
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
