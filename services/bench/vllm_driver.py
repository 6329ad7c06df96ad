"""Runs inside the Python that has vLLM, as a script: batches come in on stdin, their times go out on stdout.

Each line is JSON. The first that comes in has the arguments of vllm.LLM; the answer says which versions they meet, and
what the engine made of them. Each further one is a batch, ``{"prompts": [[1, 2], ...], "answers": [3, ...]}``, and is
answered by its seconds and how many tokens each answer has. It needs nothing of this project, and of vLLM what its
documentation shows (0.25).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    """Answers lines until stdin ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]  # its modules are not vLLM's
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    options = json.loads(sys.stdin.readline())

    import vllm  # type: ignore[import-not-found,unused-ignore]

    engine = vllm.LLM(**options)
    _say(replies, {"vllm": vllm.__version__, **_torch(), **_batches(engine)})
    for line in sys.stdin:
        _say(replies, _timed(vllm, engine, json.loads(line)))


def _timed(vllm: Any, engine: Any, work: dict[str, Any]) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
    sampling = [
        vllm.SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        for answer in work["answers"]
    ]
    began = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": [len(output.outputs[0].token_ids) for output in outputs]}


def _batches(engine: Any) -> dict[str, int]:
    """Return how much a step takes, as vLLM has decided it where no argument says it."""
    config: Any = engine
    for part in ("llm_engine", "vllm_config", "scheduler_config"):
        config = getattr(config, part, None)
    names = ("max_num_seqs", "max_num_batched_tokens")
    return {name: value for name in names if isinstance(value := getattr(config, name, None), int)}


def _torch() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    device = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"torch": str(torch.__version__), **device}


def _say(replies: TextIO, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
