"""Serve the model with vLLM and count how often its greedy choice is ours, token by token under teacher forcing.

    PYTHONPATH=/site:kernels:.:examples/pocket-moe python examples/pocket-moe/agree.py --model examples/pocket-moe/model

Needs a GPU and vLLM. Writes ``records/vllm.json``; exits with 3 below 95 %.
"""

from __future__ import annotations

import argparse
import os
import sys

from pocket_moe.command import DOES_NOT_HOLD, measuring_parser, reported

AT_LEAST = 0.95


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # CUDA, asked for below, does not survive a fork
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return reported(lambda: _agree(args))


def _agree(args: argparse.Namespace) -> int:
    # vLLM reads its environment when it is imported.
    from pocket_moe.measure.agreement import AgreementSettings, agreement
    from pocket_moe.model import export
    from pocket_moe.records import save_json
    from pocket_moe.train.memory import told_when_full

    length = args.length or export.read_config(args.model).max_position_embeddings
    settings = AgreementSettings(model=args.model, work=args.work, tokens=args.tokens, length=length)
    with told_when_full("Pass a smaller --length.", f"vLLM and rows of {length} tokens"):
        record = agreement(settings)
    save_json(args.out / "vllm.json", record)
    print(record)
    return 0 if record["agree_fp32"] >= AT_LEAST else DOES_NOT_HOLD


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=20_000, help="held-out tokens, every domain the same share")
    add("--length", type=int, help="positions of a document; all that the model has if left out")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
