"""Measure held-out perplexity by domain: the model in every precision, with shuffled routers, and its dense rival.

    python examples/pocket-moe/evaluate.py --model examples/pocket-moe/model --work build/pocket-moe

Writes ``perplexity.json`` and ``perplexity.csv``. Exits with 3 if the model's claims do not hold: that it beats the
dense model, and that shuffled routers cost at least a factor of 1.3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pocket_moe.command import DOES_NOT_HOLD, measuring_parser, reported
from pocket_moe.measure.inputs import open_shards
from pocket_moe.measure.measure import MeasureSettings, csv_rows, failures, perplexities, table
from pocket_moe.model import export
from pocket_moe.records import save_csv, save_json
from pocket_moe.train.device import open_device
from pocket_moe.train.memory import told_when_full


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)

    def run() -> int:
        with told_when_full("Pass a smaller --rows.", f"{args.rows} rows"):
            return _evaluate(args)

    return reported(run)


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--dense", type=Path, help="WORK/runs/dense/model if left out")
    add("--tokens", type=int, help="held-out tokens per domain; all if left out")
    add("--length", type=int, help="tokens of a row; as many as the model has positions if left out")
    add("--rows", type=int, default=32, help="rows at once")
    add("--device", default="auto")
    return parser


def _evaluate(args: argparse.Namespace) -> int:
    dense = args.dense or args.work / "runs/dense/model"
    shards = open_shards(args.work, "heldout", args.model, dense)
    settings = MeasureSettings(
        moe=args.model,
        dense=dense,
        device=open_device(args.device),
        tokens_per_domain=args.tokens,
        length=args.length or export.read_config(args.model).max_position_embeddings,
        rows=args.rows,
    )
    record = perplexities(settings, shards)
    save_json(args.out / "perplexity.json", record)
    save_csv(args.out / "perplexity.csv", ("variant", "domain", "tokens", "nats", "perplexity"), csv_rows(record))
    for row in table(record):
        print("  ".join(f"{cell:>10}" for cell in row))
    failed = failures(record)
    for sentence in failed:
        print(f"does not hold: {sentence}", file=sys.stderr)
    return DOES_NOT_HOLD if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
