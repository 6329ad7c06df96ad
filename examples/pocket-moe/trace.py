"""Record what the trained model does: the experts its tokens choose, and its greedy answers.

    python examples/pocket-moe/trace.py --model examples/pocket-moe/model

Writes to ``records/``: ``experts.npz`` and ``load.json`` (200k held-out tokens, every domain the same share),
``greedy.jsonl`` (200 prompts with the oracle's greedy answers, those left out whose choices are closer than float32
decides), ``samples.jsonl`` (twenty answers for the model card, nothing left out), ``demo.jsonl`` (the answer to the
prompt that the documents show) and ``logits.json`` (how far transformers' logits are from the oracle's, over
``greedy.jsonl``). ``traced.json`` says which weights they are of. Minutes on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import torch

from pocket_moe.command import measuring_parser, reported
from pocket_moe.corpus.split import DEMO
from pocket_moe.errors import PocketError
from pocket_moe.measure.greedy import Answerer, clear_answers
from pocket_moe.measure.inputs import open_shards
from pocket_moe.measure.logits import compare
from pocket_moe.measure.samples import Prompt, headword, headwords, prefixes, save_samples
from pocket_moe.measure.traffic import load_record, trace
from pocket_moe.model import export
from pocket_moe.model.fingerprint import fingerprint, note
from pocket_moe.records import load_greedy, save_greedy, save_json
from pocket_moe.train.device import open_device


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)

    def run() -> None:
        for part in args.only or PARTS:
            PARTS[part](args)

    return reported(run)


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, work="folder with shards/ and text/")
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", help="not all of these")
    add("--tokens", type=int, default=200_000)
    add("--length", type=int, default=512, help="tokens of a document that are traced")
    add("--rows", type=int, default=16, help="documents at once")
    add("--prompts", type=int, default=200)
    add("--new", type=int, default=48, help="tokens of an answer in greedy.jsonl")
    add("--sample-new", type=int, default=64, help="tokens of an answer in samples.jsonl and demo.jsonl")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="for the experts; the oracle runs on the CPU")
    return parser


def _experts(args: argparse.Namespace) -> None:
    weights = {"model": fingerprint(args.model)}
    shards = open_shards(args.work, "heldout", args.model)
    model = export.load(args.model, torch.float32, open_device(args.device))
    traced = trace(model, shards, tokens=args.tokens, length=args.length, rows=args.rows)
    traced.save(args.out / "experts.npz")
    note(args.out / "experts.npz", weights)
    save_json(args.out / "load.json", load_record(traced) | {"weights": weights})
    size = (args.out / "experts.npz").stat().st_size
    print(f"{len(traced.ids):,} tokens of {len(traced.document_domain):,} documents, {size:,} bytes", flush=True)


def _greedy(args: argparse.Namespace) -> None:
    """A quarter held-out headwords, a quarter known ones, half beginnings of other documents."""
    text, seed, weights = args.work / "text", args.seed, {"model": fingerprint(args.model)}
    answerer = Answerer(args.model, most=args.new)
    quarter = args.prompts // 4
    parts = [
        clear_answers(answerer, headwords(text, "heldout", seed), quarter),
        clear_answers(answerer, headwords(text, "train", seed), quarter),
        clear_answers(answerer, prefixes(text, seed), args.prompts - 2 * quarter),
    ]
    answers = list(itertools.chain.from_iterable(parts))
    if not answers:
        raise PocketError("No prompt has a clear answer.", hint="Is the model trained? Is there text in WORK/text?")
    save_greedy(args.out / "greedy.jsonl", answers)
    note(args.out / "greedy.jsonl", weights)
    margin, router = (min(getattr(answer, name) for answer in answers) for name in ("margin", "router_margin"))
    print(f"{len(answers)} answers; smallest margins: logits {margin:.2g}, router {router:.2g}", flush=True)


def _samples(args: argparse.Namespace) -> None:
    """The first ten of each kind, in the drawn order."""
    drawn = [headwords(args.work / "text", split, args.seed)[:10] for split in ("heldout", "train")]
    _save_answers(args, "samples.jsonl", [*itertools.chain(*drawn)])


def _demo(args: argparse.Namespace) -> None:
    _save_answers(args, "demo.jsonl", [headword(args.work / "text", "train", DEMO)])


def _save_answers(args: argparse.Namespace, name: str, prompts: Sequence[Prompt]) -> None:
    weights = {"model": fingerprint(args.model)}
    answerer = Answerer(args.model, most=args.sample_new)
    save_samples(args.out / name, [answerer.sample(prompt) for prompt in prompts])
    note(args.out / name, weights)


def _logits(args: argparse.Namespace) -> None:
    weights = {"model": fingerprint(args.model)}
    record = compare(args.model, load_greedy(args.out / "greedy.jsonl"))
    save_json(args.out / "logits.json", record | {"weights": weights})
    print(record, flush=True)


PARTS = {"experts": _experts, "greedy": _greedy, "samples": _samples, "demo": _demo, "logits": _logits}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
