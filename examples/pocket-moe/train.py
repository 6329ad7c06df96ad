"""Train the pocket model, its dense rival or a plain speculator on the shards that ``data.py`` made.

    python examples/pocket-moe/train.py --run moe --steps 12000 --minutes 9 --attention varlen --compile --graph
    python examples/pocket-moe/train.py --run moe --steps 12000 --minutes 9 --compile --graph --resume
    python examples/pocket-moe/train.py --run trial --smoke

``--resume`` goes on with the same run: give the options of training again as they were, or they are refused by name.
``--steps`` may grow while a wsd schedule is stable, and the options of speed may change. A resume from a checkpoint
kept with ``--keep small`` (pieces of at most 15 MiB) is approximate.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from pocket_moe.command import WORK, parser, reported
from pocket_moe.config import POCKET
from pocket_moe.corpus.batches import BatchSettings
from pocket_moe.model.model import Options
from pocket_moe.train.loop import TrainSettings
from pocket_moe.train.run import export_run, train
from pocket_moe.train.run_settings import RunSettings
from pocket_moe.train.schedule import Schedule

SMOKE = {
    "size": "tiny",
    "device": "cpu",
    "dtype": "float32",
    "steps": 20,
    "rows": 4,
    "length": 64,
    "warmup": 4,
    "log_every": 5,
    "eval_every": 10,
    "save_every": 10,
    "eval_tokens": 512,
}
"""Defaults with ``--smoke``: seconds on a CPU."""


def main(arguments: list[str]) -> int:
    args = _parsed(arguments)
    if args.smoke:
        torch.set_num_threads(1)  # for tensors this small more threads only wait for one another
    return reported(lambda: _export(args) if args.export_only else train(_settings(args)))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    made = _parser()
    if made.parse_args(arguments).smoke:
        made.set_defaults(**SMOKE)
    return made.parse_args(arguments)


def _export(args: argparse.Namespace) -> None:
    print(export_run(args.work, args.run, args.export_dtype))


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    add = made.add_argument
    add("--work", type=Path, default=WORK, help="folder with shards/ and tokenizer/")
    add("--run", required=True, metavar="NAME", help="goes to WORK/runs/NAME")
    add("--kind", choices=("moe", "dense", "speculator"), default="moe")
    add("--size", choices=("pocket", "tiny"), default="pocket", help="tiny: for trials")
    add("--smoke", action="store_true", help="20 steps of a tiny model on the CPU, where no option says otherwise")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--start", type=Path, metavar="MODEL", help="begin with the weights of an exported folder")
    add("--export-only", action="store_true", help="write runs/NAME/model from the last checkpoint")
    add("--export-dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    add("--device", default="cuda")
    _add_length(made.add_argument_group("how long, how often"))
    _add_training(made.add_argument_group("training"))
    _add_speed(made.add_argument_group("speed (results differ by rounding alone)"))
    return made


def _add_length(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--steps", type=int, default=10_000, help="where the whole run ends")
    add("--minutes", type=float, help="stop with a checkpoint after so long")
    add("--log-every", type=int, default=20, metavar="STEPS", help="also how often the device is waited for")
    add("--eval-every", type=int, default=500, metavar="STEPS")
    add("--eval-tokens", type=int, default=16_384, help="held-out tokens per domain")
    add("--save-every", type=int, default=2_000, metavar="STEPS")
    add("--keep", choices=("full", "small", "both"), default="full", help="small: approximate, in pieces that travel")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rows", type=int, default=64, help="packed rows of a step")
    add("--length", type=int, default=POCKET.max_position_embeddings, help="tokens of a row")
    add("--weights", type=_weights, default={}, metavar="DOMAIN=TIMES,...", help="repeat a domain within an epoch")
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=2e-3)
    add("--lr-floor", type=float, default=0.1, help="last rate, as a share of the peak")
    add("--warmup", type=int, default=200, metavar="STEPS")
    add("--schedule", choices=("wsd", "cosine"), default="wsd")
    add("--decay", type=float, default=0.2, help="share of the run in which wsd decays")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0)
    add("--dropout", type=float, default=0.0)
    add("--balance", type=float, default=0.01, help="weight of the routers' balance loss")
    add("--z-loss", type=float, default=0.0)
    add("--average", type=float, default=0.0, metavar="DECAY", help="keep and export a moving average of the weights")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the arithmetic; masters are float32")


def _add_speed(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--compile", action="store_true", help="torch.compile between the experts")
    add("--graph", action="store_true", help="capture the step in a CUDA graph")
    add("--attention", choices=("sdpa", "varlen"), default="sdpa")
    add("--product", choices=("sparse_mlp", "parallel_linear"), default="sparse_mlp")
    add("--chunk-rows", type=int, default=8192, help="rows of logits at once; 0: all")


def _weights(text: str) -> dict[str, float]:
    try:
        return {name: float(times) for name, times in (part.split("=") for part in text.split(",") if part)}
    except ValueError as error:
        raise argparse.ArgumentTypeError("expected DOMAIN=TIMES,..., such as dictionary=3,perl=0.5") from error


def _settings(args: argparse.Namespace) -> RunSettings:
    tokens = args.rows * args.length
    schedule = Schedule(
        kind=args.schedule,
        peak=args.lr,
        floor=args.lr_floor,
        warmup=args.warmup * tokens,
        total=args.steps * tokens,
        decay=args.decay,
    )
    training = TrainSettings(
        schedule=schedule,
        balance=args.balance,
        z=args.z_loss,
        weight_decay=args.weight_decay,
        clip=args.clip,
        average=args.average,
        graph=args.graph,
        compile=args.compile,
    )
    return RunSettings(
        work=args.work,
        name=args.run,
        kind=args.kind,
        size=args.size,
        steps=args.steps,
        minutes=args.minutes,
        batches=BatchSettings(rows=args.rows, length=args.length, seed=args.seed, weights=args.weights),
        training=training,
        options=Options(attention=args.attention, product=args.product, chunk_rows=args.chunk_rows),
        dropout=args.dropout,
        dtype=args.dtype,
        device=args.device,
        resume=args.resume,
        start=args.start,
        log_every=args.log_every,
        eval_every=args.eval_every,
        eval_tokens=args.eval_tokens,
        save_every=args.save_every,
        keep=args.keep,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
