"""Train the target's speculators by boost-tuning, and measure how often they are right.

    python examples/pocket-moe/speculate.py --model examples/pocket-moe/model --attention varlen --graph --compile
    python examples/pocket-moe/speculate.py --measure-only

Reads ``WORK/shards``; writes ``speculators/0, 1, ...`` in the hub's layout, without a tokenizer (they take the
target's), and ``records/acceptance.json``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pocket_moe.command import EXAMPLE, measuring_parser, reported
from pocket_moe.config import POCKET, PocketConfig
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.measure.inputs import drawn_documents, open_shards
from pocket_moe.model import export
from pocket_moe.model.dense import speculator
from pocket_moe.model.fingerprint import fingerprint, speculator_folders
from pocket_moe.model.model import Options, PocketMoe
from pocket_moe.records import load_json, save_json
from pocket_moe.speculators.boost import BoostSettings, boost
from pocket_moe.speculators.boost_rows import LabelledRows, Written, continuations, label, pack_documents
from pocket_moe.speculators.drafts_measure import AcceptanceSettings, acceptance
from pocket_moe.train.device import open_device
from pocket_moe.train.memory import told_when_full

MAX_BYTES = 3_000_000
"""Of a speculator's weights in bfloat16."""


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)

    def run() -> None:
        with told_when_full("Pass a smaller --rows.", f"{args.rows} rows of {args.length} tokens"):
            _speculate(args)

    return reported(run)


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--speculators", type=Path, default=EXAMPLE / "speculators")
    add("--measure-only", action="store_true", help="of the speculators that are there")
    add("--count", type=int, default=2)
    add("--layers", type=int, default=3)
    add("--floors", type=float, nargs="+", default=[0.0, 0.1], help="weights of covered positions to compare")
    add("--steps", type=int, default=3000, help="of the first speculator")
    add("--boost-steps", type=int, default=2000, help="of each other one")
    add("--lr", type=float, default=3e-3)
    add("--boost-lr", type=float, default=1.5e-3)
    add("--train-tokens", type=int, help="take documents up to so many tokens; all if left out")
    add("--own", type=int, default=20_000, metavar="DOCUMENTS", help="that the target continues, to learn from too")
    add("--own-prompts", type=int, default=200, help="per domain, that the target continues, to measure on")
    add("--rows", type=int, default=64)
    add("--length", type=int, default=POCKET.max_position_embeddings)
    add("--seed", type=int, default=0)
    add("--device", default="auto")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of labelling and training")
    add("--attention", choices=("sdpa", "varlen"), default="sdpa")
    add("--compile", action="store_true")
    add("--graph", action="store_true")
    return parser


def _speculate(args: argparse.Namespace) -> None:
    file = args.out / "acceptance.json"
    before = load_json(file) if args.measure_only and file.is_file() else {}
    trained = [] if args.measure_only else _train(args)
    measured = _measure(args)
    save_json(file, measured | {"tried": trained or _tried(before, measured["weights"]["speculators"])})


def _tried(before: Mapping[str, Any], speculators: list[str]) -> list[dict[str, Any]]:
    """What an earlier record says of the training of the same speculators; nothing if it is of others."""
    same = before.get("weights", {}).get("speculators") == speculators
    tried: list[dict[str, Any]] = before["tried"] if same else []
    return tried


def _train(args: argparse.Namespace) -> list[dict[str, Any]]:
    shards = open_shards(args.work, "train", args.model)
    target = export.load(args.model, getattr(torch, args.dtype), open_device(args.device), options=_options(args))
    config = speculator(target.config, layers=args.layers)
    _check_size(config)
    rows = _labelled(args, target, shards)
    del target
    pool = boost(config, rows, _settings(args))
    for folder in speculator_folders(args.speculators):
        if int(folder.name) >= args.count:  # of an earlier, larger pool: it would be measured with this one
            shutil.rmtree(folder)
    for index, model in enumerate(pool.speculators):
        export.save(model, args.model, args.speculators / str(index), with_tokenizer=False)
    return pool.tried


def _labelled(args: argparse.Namespace, target: PocketMoe, shards: Shards) -> LabelledRows:
    documents = drawn_documents(shards, args.train_tokens, args.seed)
    packed = pack_documents(shards, documents, args.length, pad_id=target.config.pad_token_id)
    rows = label(target, packed, batch_rows=args.rows)
    if args.own:
        own, shape = documents[: args.own], Written(length=args.length)
        rows = rows.join(continuations(target, shards, own, shape, batch_rows=1024))
    labels = int((rows.labels_RL >= 0).sum())
    print(f"{labels:,} of the target's tokens to learn, in {len(rows):,} rows", flush=True)
    return rows


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """In float32, from the exported folders."""
    shards, device = open_shards(args.work, "heldout", args.model), open_device(args.device)
    target = export.load(args.model, torch.float32, device)
    folders = speculator_folders(args.speculators)
    if not folders:
        raise PocketError(f"There are no speculators in {args.speculators}.", hint="Leave out --measure-only.")
    weights = {"model": fingerprint(args.model), "speculators": [fingerprint(folder) for folder in folders]}
    speculators = [export.load(folder, torch.float32, device) for folder in folders]
    settings = AcceptanceSettings(
        rows=min(32, args.rows), own_prompts=args.own_prompts, written=Written(length=args.length)
    )
    record = acceptance(target, speculators, shards, settings)
    bytes_each = [model.config.parameters() * 2 for model in speculators]
    parts = {kind: record[kind] for kind in ("teacher_forcing", "own_output")}
    for kind, part in (parts | {f"in a row of {record['depth']}": record["own_output"]["runs"]}).items():
        print(kind, {name: shares["all"] for name, shares in part["accepted"].items()}, flush=True)
    return record | {"weights": weights, "bytes": bytes_each}


def _check_size(config: PocketConfig) -> None:
    size = config.parameters() * 2
    if size > MAX_BYTES:
        raise PocketError(f"Such a speculator takes {size:,} bytes, over {MAX_BYTES:,}.", hint="Pass fewer --layers.")


def _settings(args: argparse.Namespace) -> BoostSettings:
    return BoostSettings(
        count=args.count,
        floors=tuple(args.floors),
        steps=args.steps,
        boost_steps=args.boost_steps,
        rows=args.rows,
        lr=args.lr,
        boost_lr=args.boost_lr,
        seed=args.seed,
        dtype=getattr(torch, args.dtype),
        graph=args.graph,
        compile=args.compile,
        options=_options(args),
    )


def _options(args: argparse.Namespace) -> Options:
    return Options(attention=args.attention)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
