"""Write the model card and its pictures from the records; the same records give the same bytes.

    python examples/pocket-moe/card.py --collect --work build/pocket-moe
    python examples/pocket-moe/card.py --check

``--collect`` first takes from the working folder: the loss curves and the counts of text, to ``records/``, and the
manifest, to beside it, with labels and notices as ``sources.toml`` has them now. ``--check`` writes nothing and exits
with 1 if what is there differs, or if ``tried.json`` does not explain the runs. Records of other weights than the
folder's ``model/`` and ``speculators/`` hold are refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.pictures import INSTALL
from pocket_moe.card.collect import collect
from pocket_moe.card.facts import Facts, load_facts
from pocket_moe.card.plots_heat import heat_map
from pocket_moe.card.plots_lines import loss_curves, peaks
from pocket_moe.card.text import card
from pocket_moe.card.training import unexplained
from pocket_moe.card.weights import weights_readmes
from pocket_moe.command import WORK, parser, reported
from pocket_moe.errors import needed
from pocket_moe.readers.sources import load_sources

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    return reported(lambda: _card(args))


def _card(args: argparse.Namespace) -> int:
    if args.collect:
        runs = {"moe": args.moe_runs, "dense": args.dense_runs}
        collect(args.work, args.root / "records", runs, load_sources(args.sources))
    needed("matplotlib", INSTALL)
    facts = load_facts(args.root)
    wrong = unexplained(facts)
    for sentence in wrong:
        print(f"{sentence}: note there by hand what was run", file=sys.stderr)
    files = render(facts)
    return _check(args.root, files) or bool(wrong) if args.check else _write(args.root, files)


def render(facts: Facts) -> dict[str, str]:
    """Contents of files by path below the example's folder."""
    return texts(facts) | pictures(facts)


def texts(facts: Facts) -> dict[str, str]:
    return {"MODEL_CARD.md": card(facts)} | weights_readmes(facts)


def pictures(facts: Facts) -> dict[str, str]:
    runs = {"MoE": facts.moe, "dense": facts.dense}
    training = {name: run.training_curve for name, run in runs.items()}
    heldout = {name: run.heldout_curve for name, run in runs.items()}
    return {
        "plots/loss.svg": loss_curves(training, heldout),
        "plots/experts.svg": heat_map(facts.load),
        "plots/load.svg": peaks(facts.load),
    }


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    add = made.add_argument
    add("--root", type=Path, default=HERE, help="folder with model/, speculators/, records/ and manifest.json")
    add("--check", action="store_true", help="compare instead of writing")
    add("--collect", action="store_true", help="take loss curves, counts and manifest from WORK first")
    add("--work", type=Path, default=WORK, help="the working folder")
    add("--sources", type=Path, default=HERE / "sources.toml", help="the list of packages")
    add("--moe-runs", nargs="+", default=["moe"], help="in the order in which one went on from the other")
    add("--dense-runs", nargs="+", default=["dense"])
    return made


def _write(root: Path, files: dict[str, str]) -> int:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return 0


def _check(root: Path, files: dict[str, str]) -> int:
    stale = [name for name, text in files.items() if not _same(root / name, text)]
    for name in stale:
        print(f"{name} is not what the records say: run examples/pocket-moe/card.py", file=sys.stderr)
    return 1 if stale else 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
