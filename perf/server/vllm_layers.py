"""vLLM's expert parallelism and ours: time of a layer of Qwen3-30B-A3B's shapes at the same batches, in one table.

    PYTHONPATH=.:kernels:tests:/site python3 perf/server/vllm_layers.py --ours OUT/results.json [--out DIR]

Needs vLLM (0.25.1 was compared with) on the path and 2 or more GPUs. ``--ours``: what ``perf.fabric.exchange --lanes
modes`` wrote in the same lease. vLLM runs data parallel over all GPUs with expert parallelism and CUDA graphs, random
weights. A layer's time is the difference of decode steps between a deeper and a shallower model of those shapes, over
the difference in layers: embedding, sampling and scheduling drop out; attention, which ours has a stand-in for, does
not. The shallower one must not be so shallow that the host sets its pace: from 4 to 16 layers each seemed to take less
time than reading its weights does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

TOTALS = (32, 128, 512, 2048)
PROMPT, SHORT, LONG = 128, 8, 72
SHAPES: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 32768, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip


def rank_main(rank: int, ranks: int, port: int, depth: int, totals: list[int], barrier: Any, results: Any) -> None:
    """One rank: an engine on its GPU. Puts ``(rank, total, step_s)``, or the error that ended it, into ``results``."""
    os.environ |= {
        "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    try:
        measure(rank, ranks, depth, totals, barrier, results)
    except BaseException:  # noqa: BLE001  the parent reports it
        results.put((rank, -1, traceback.format_exc()[-3000:]))
        barrier.abort()


def measure(rank: int, ranks: int, depth: int, totals: list[int], barrier: Any, results: Any) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(SHAPES | {"num_hidden_layers": depth}))
    rows = max(totals) // ranks
    began = time.time()
    engine = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=rows,
        gpu_memory_utilization=0.6, enable_prefix_caching=False, enable_expert_parallel=True, tensor_parallel_size=1,
        compilation_config={"cudagraph_capture_sizes": sorted({total // ranks for total in totals})},
    )  # fmt: skip
    results.put((rank, 0, time.time() - began))
    drawn = random.Random(rank)

    def run(sequences: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [drawn.randrange(10, 32000) for _ in range(PROMPT)]} for _ in range(sequences)]
        wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        barrier.wait(120)  # ranks decode in lock-step anyway
        start = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - start

    run(8, SHORT)
    for total in totals:
        short = min(run(total // ranks, SHORT) for _ in range(2))
        long = min(run(total // ranks, LONG) for _ in range(2))
        results.put((rank, total, (long - short) / (LONG - SHORT)))
    barrier.wait(120)


def steps_of(depth: int, ranks: int, totals: list[int], seconds: float) -> dict[int, float]:
    """Seconds of a decode step by batch of all ranks; the slowest rank's. Ends what it started."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        context.Process(target=rank_main, args=(rank, ranks, port, depth, totals, barrier, results))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    found: dict[int, list[float]] = {}
    until = time.monotonic() + seconds
    try:
        for _ in range(ranks * (1 + len(totals))):
            rank, total, answer = results.get(timeout=max(0.1, until - time.monotonic()))
            if total < 0:
                raise RuntimeError(f"rank {rank}:\n{answer}")
            print(f"vLLM {depth} layers, rank {rank}: {total or 'started'} {answer:.4f} s", flush=True)
            if total:
                found.setdefault(total, []).append(answer)
    finally:
        for child in children:
            child.join(10 if len(found) == len(totals) else 0)
            if child.is_alive():
                child.kill()
    return {total: max(times) for total, times in found.items()}


def table(ours: Path | None, shallow: dict[int, float], deep: dict[int, float], layers: int) -> list[dict[str, Any]]:
    """A row for each batch, microseconds."""
    notes = json.loads(ours.read_text())["results"] if ours and ours.exists() else []
    modes = {note["total"]: note for note in notes if note["lane"] == "modes" and "planner" in note}
    rows = []
    for total in sorted(set(shallow) | set(modes)):
        row: dict[str, Any] = {"rows": total}
        for mode in ("colocated", "disaggregated", "pingpong", "planner"):
            row[mode] = modes.get(total, {}).get(mode)
        if total in shallow and total in deep:
            row["vllm"] = (deep[total] - shallow[total]) / layers * 1e6
            row["vllm_step_ms"] = [shallow[total] * 1e3, deep[total] * 1e3]
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, help="results.json of perf.fabric.exchange")
    parser.add_argument("--depths", type=int, nargs=2, default=[16, 48])
    parser.add_argument("--ranks", type=int, default=0, help="GPUs (default: all)")
    parser.add_argument("--totals", type=int, nargs="+", default=list(TOTALS))
    parser.add_argument("--limit", type=float, default=170, help="seconds after which all ends")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    timer = threading.Timer(options.limit, os._exit, args=(3,))
    timer.daemon = True
    timer.start()
    ranks = options.ranks or _gpus()
    found: list[dict[int, float]] = [{}, {}]
    for at, depth in enumerate(options.depths):
        try:
            left = options.limit - 5 - (time.monotonic() - began)
            found[at] = steps_of(depth, ranks, options.totals, left if at else left * 0.6)
        except Exception as error:  # noqa: BLE001  our times are printed all the same
            print(f"vLLM with {depth} layers: {type(error).__name__}: {error}", flush=True)
    rows = table(options.ours, *found, options.depths[1] - options.depths[0])
    for row in rows:
        print(json.dumps({name: round(fact, 1) if isinstance(fact, float) else fact for name, fact in row.items()}))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "vllm_layers.json").write_text(json.dumps(rows, indent=1))
    return 0 if all(found) else 1


def _gpus() -> int:
    """Counted in a child: CUDA must not be initialised before ranks are started."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_count)


def _count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
