"""``expertmesh-load record``: which experts a checkpoint's routers choose for each prompt of a file.

The reference model computes them, on the CPU, in float32: small checkpoints take seconds, large ones do not fit. The
recording is what ``--workload hot-experts`` and ``expertmesh plan --routing`` read.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.cli.options import COUNT, Parser
from loadgen.errors import FileUnusable
from loadgen.workload.files import read_prompts
from loadgen.workload.hot_experts import Recording

if TYPE_CHECKING:
    from torch import Tensor

_MAX_TOKENS = 512
"""Of a prompt: the reference has no cache."""


class _Counts:
    """Rows by layer and expert."""

    def __init__(self) -> None:
        self.rows: dict[int, Counter[int]] = {}

    def add(self, layer: int, expert_TK: Tensor) -> None:
        self.rows.setdefault(layer, Counter()).update(expert_TK.flatten().tolist())

    def taken(self, experts: int) -> list[list[float]]:
        """Returns the counts by layer, and begins again."""
        found = [[float(rows[expert]) for expert in range(experts)] for _, rows in sorted(self.rows.items())]
        self.rows = {}
        return found


def record(model: Path, prompts: Sequence[str], say: Callable[[str], None]) -> Recording:
    """Returns what the routers of the checkpoint in ``model`` do with each prompt. Layers without experts are left out
    of the count of layers."""
    from tokenizers import Tokenizer

    from services.model.reference import ReferenceModel

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = _Counts()
    reference = ReferenceModel.load(model, found.add)
    counts = {}
    for number, prompt in enumerate(prompts, 1):
        reference.run(tokenizer.encode(prompt).ids[:_MAX_TOKENS])
        counts[str(number)] = found.taken(reference.spec.num_experts)
        if number % 10 == 0:
            say(f"{number} of {len(prompts)} prompts")
    return Recording(counts, {str(number): [prompt] for number, prompt in enumerate(prompts, 1)})


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="expertmesh-load record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines with prompt")
    parser.add_argument("--most", type=COUNT, default=200, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    turns = [each.turns[0] for each in read_prompts(options.prompts, most_tokens=1).conversations]
    prompts = list(dict.fromkeys(turn.content for turn in turns if isinstance(turn.content, str)))
    if not prompts:
        raise FileUnusable(f"{options.prompts} has no prompts of text.")
    if not (options.model / "tokenizer.json").is_file():
        raise FileUnusable(f"{options.model} has no tokenizer.json.", hint="Give the folder of a checkpoint.")
    recording = record(options.model, prompts[: options.most], print)
    options.out.write_bytes(msgspec.json.encode(recording) + b"\n")
    print(f"written: {options.out}")
    return 0
