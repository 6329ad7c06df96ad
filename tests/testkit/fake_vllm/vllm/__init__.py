"""What of vLLM's Python a bench uses, without a model: arguments and results as vLLM 0.25 has them."""

import time
from types import SimpleNamespace

__version__ = "0.25.1"
TOKEN_S = 0.0005
KNOWN = {
    "skip_tokenizer_init", "dtype", "seed", "gpu_memory_utilization", "enforce_eager", "load_format", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
}  # fmt: skip
"""Arguments of the engine that a bench gives; others are errors, as a misspelled one is there."""


class SamplingParams:
    def __init__(self, *, temperature=1.0, max_tokens=16, ignore_eos=False, detokenize=True):
        assert temperature == 0.0
        assert ignore_eos
        assert not detokenize
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, **arguments):
        if unknown := arguments.keys() - KNOWN:
            raise TypeError(unknown)
        assert arguments["skip_tokenizer_init"]
        print(f"a line of vLLM that is no answer: {model}")
        if arguments.get("dtype") == "refused":
            raise ValueError("dtype")
        batches = {"max_num_seqs": arguments.get("max_num_seqs", 256)}
        batches["max_num_batched_tokens"] = arguments.get("max_num_batched_tokens", 8192)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(**batches)))
        self.max_model_len, self.short = arguments["max_model_len"], arguments.get("load_format") == "short"

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert not use_tqdm
        outputs = []
        for prompt, sampling in zip(prompts, sampling_params, strict=True):
            ids = prompt["prompt_token_ids"]
            assert len(ids) + sampling.max_tokens <= self.max_model_len
            drawn = [1] * (sampling.max_tokens - self.short)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=drawn)]))
        time.sleep(TOKEN_S * max(sampling.max_tokens for sampling in sampling_params))
        return outputs
