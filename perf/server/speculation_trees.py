"""What trees of drafts by prompt lookup gain over chains: accepted tokens by domain, and three ways of verifying one.

    PYTHONPATH=.:kernels:tests python3 perf/server/speculation_trees.py accepted        (two CPU cores, 3 minutes)
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation_trees.py ways            (two CPU cores, 3 minutes)
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation_trees.py ways --device cuda            (one GPU)

``accepted`` drafts along answers of the pocket model to recorded prompts, without computing them again: an answer is
the same whatever is drafted. By domain: tokens that a sequence gets from a step, and rows that it takes, over all steps
but the prompt's. Answers: ended (as recorded, to their end), plain (96 tokens), repeated (96 tokens, where the prompt
has the recorded answer).

    chain      one chain
    tree N     N chains of one lookup
    short      one chain of a lookup that is content with a single token that agrees; short N: N of its chains
    both 4     four chains of both lookups in turn, as of two speculators

``ways`` verifies trees behind a prompt in the three ways of ExpertFlow, figure 5.9, and compares time and logits:

    sequence   each branch is a sequence of its own: its rows, and a copy of the block that the branches would share
    token      one node in each pass, in the slot of its position, in depth-first order
    tree       all nodes in one pass; each sees its ancestors
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from testkit.gpu.decode_bench import Parts, answers_of, load  # noqa: E402
from testkit.gpu.decode_bench import request as ask  # noqa: E402
from testkit.pocket.answers import POCKET, recorded  # noqa: E402
from torch import Tensor  # noqa: E402

from services.attention.kv_cache import KVCache  # noqa: E402
from services.attention.sequences.sequence import SequenceState, open_sequence  # noqa: E402
from services.attention.sequences.tree import MAX_NODES, TokenTree  # noqa: E402
from services.attention.speculation.drafting import Speculator  # noqa: E402
from services.attention.speculation.ngram import NgramSpeculator  # noqa: E402
from services.attention.speculation.several import Several  # noqa: E402
from services.attention.step.flatten import tree_rows  # noqa: E402
from services.attention.step.forward import forward  # noqa: E402
from services.config.speculation import SpeculativeConfig  # noqa: E402
from services.model.inputs import SequenceRows, StepInputs  # noqa: E402

ANSWER, DEPTH, BLOCK = 96, 4, 16
KINDS = ("ended", "plain", "repeated")
PROSE = ("dictionary", "novels", "verse", "devil", "science", "elements")
"""Domains of prose; the others are manuals and code."""


@dataclass
class Tally:
    steps: int = 0
    tokens: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Drafter:
    """Drafts ``branches`` chains along known answers."""

    branches: int
    make: Callable[[], Speculator]
    by_domain: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def follow(self, domain: str, state: SequenceState, answer: Sequence[int]) -> None:
        speculator, at, tally = self.make(), 1, self.by_domain[domain]
        state.token_ids.append(answer[0])
        while at < len(answer):
            most = min(DEPTH, len(answer) - at - 1)
            tree = TokenTree.of(speculator.chains(state, most, self.branches) if most else (), MAX_NODES)
            drawn = [answer[at + depth] for depth in tree.depths()]  # what counts is drawn along the right way only
            taken = 1 + len(tree.walk(drawn))
            tally.steps += 1
            tally.tokens += taken
            tally.rows += 1 + len(tree.tokens)
            state.token_ids += answer[at : at + taken]
            at += taken


def lookup(shortest: int) -> NgramSpeculator:
    return NgramSpeculator(SpeculativeConfig(method="ngram", prompt_lookup_min=shortest))


def accepted(parts: Parts, kinds: Sequence[str]) -> None:
    prompts = recorded()
    engine = parts.engine(None, max_num_seqs=64, max_num_batched_tokens=512, kv_blocks=4096, prefix_cache=False)
    for kind in kinds:
        asked = [ask(str(at), _prompt(kind, one), ANSWER) for at, one in enumerate(prompts)]
        said = {request.id: one["output_ids"] for request, one in zip(asked, prompts, strict=True)}
        if kind != "ended":
            said = {name: [token for token, _ in answer] for name, answer in answers_of(engine, asked).items()}
        drafters = {
            "chain": Drafter(1, lambda: lookup(2)),
            "tree 2": Drafter(2, lambda: lookup(2)),
            "tree 4": Drafter(4, lambda: lookup(2)),
            "short": Drafter(1, lambda: lookup(1)),
            "short 2": Drafter(2, lambda: lookup(1)),
            "short 4": Drafter(4, lambda: lookup(1)),
            "both 4": Drafter(4, lambda: Several([lookup(2), lookup(1)])),
        }
        for name, drafter in drafters.items():
            for request, record in zip(asked, prompts, strict=True):
                domain = record["domain"] if record["domain"] in PROSE else "manuals and code"
                for each in (domain, "all"):
                    drafter.follow(each, open_sequence(request, 1, ()), said[request.id])
            for domain, tally in sorted(drafter.by_domain.items()):
                print(
                    f"{kind:9} {domain:17} {name:7}: {tally.tokens / max(1, tally.steps):.2f} tokens and "
                    f"{tally.rows / max(1, tally.steps):.2f} rows a step, {tally.steps} steps", flush=True,
                )  # fmt: skip


def _prompt(kind: str, record: dict[str, list[int]]) -> list[int]:
    ids = list(record["prompt_ids"])
    return [*ids, *record["output_ids"], *ids] if kind == "repeated" else ids


@dataclass(frozen=True)
class Stage:
    """A cache that holds a prompt, and what verifies trees behind it. Each way returns logits of the last known token
    and of each node, in the order of the tree."""

    parts: Parts
    kv: KVCache
    known: list[int]

    def run(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[SequenceRows]) -> Tensor:
        slots = list[int]()
        for one in sequences:
            places = range(one.kv_len - one.length, one.kv_len)
            slots += [one.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
        token_ids_T, positions_T, slots_T = torch.tensor(
            [list(tokens), list(positions), slots], device=self.parts.model.device
        )
        inputs = StepInputs(
            token_ids_T=token_ids_T, positions_T=positions_T, slots_T=slots_T, sequences=tuple(sequences),
            logits_rows_R=slots_T[:0],
        )  # fmt: skip
        return self.parts.model.logits(forward(self.parts.model, self.parts.link(), self.kv, (inputs,)))

    @property
    def start(self) -> int:
        return len(self.known) - 1

    def tree(self, tree: TokenTree) -> Tensor:
        rows = tree_rows(tree)
        length = len(rows.depth_W)
        one = SequenceRows(start=0, length=length, kv_len=self.start + length, blocks=range(64), tree=rows)
        positions = [self.start + depth for depth in tree.depths()]
        return self.run([self.known[-1], *tree.tokens], positions, [one])

    def token(self, tree: TokenTree) -> Tensor:
        found = []
        for token, depth in zip((self.known[-1], *tree.tokens), tree.depths(), strict=True):
            position = self.start + depth
            one = SequenceRows(start=0, length=1, kv_len=position + 1, blocks=range(64))
            found.append(self.run([token], [position], [one]))
        return torch.cat(found)

    def sequence(self, tree: TokenTree) -> Tensor:
        """A branch's block that is not full, and those behind it, are its own."""
        leaves = [row for row in range(1, len(tree.tokens) + 1) if row not in tree.parents]
        shared, tokens, positions, sequences = self.start // BLOCK, list[int](), list[int](), list[SequenceRows]()
        for number, leaf in enumerate(leaves):
            path, own = tree.path(leaf), [*range(64 + 4 * number, 68 + 4 * number)]
            if number:
                at = torch.arange(BLOCK)
                self.kv.move(shared * BLOCK + at, own[0] * BLOCK + at)
            blocks = [*range(shared), *own] if number else range(64)
            length = 1 + len(path)
            sequences.append(SequenceRows(start=len(tokens), length=length, kv_len=self.start + length, blocks=blocks))
            tokens += [self.known[-1], *(tree.tokens[row - 1] for row in path)]
            positions += range(self.start, self.start + length)
        logits_RV, row_of = self.run(tokens, positions, sequences), dict[int, int]()
        for one, leaf in zip(sequences, leaves, strict=True):
            row_of.update({row: one.start + at for at, row in enumerate([0, *tree.path(leaf)])})
        return logits_RV[[row_of[row] for row in range(len(tree.tokens) + 1)]]


def ways(parts: Parts, turns: int) -> None:
    spec, device = parts.model.spec, parts.model.device
    for length in (60, 500):
        kv = KVCache(spec, num_blocks=200, block_size=BLOCK, dtype=parts.model.dtype, device=device)
        text = [token for record in recorded() for token in (*record["prompt_ids"], *record["output_ids"])]
        stage = Stage(parts, kv, text[:length])
        whole = SequenceRows(start=0, length=length, kv_len=length, blocks=range(64))
        stage.run(stage.known, range(length), [whole])
        for branches in (1, 2, 4, 8):
            tree = TokenTree.of([text[at : at + DEPTH] for at in range(length, length + 40 * branches, 40)], MAX_NODES)
            steps = {"sequence": stage.sequence, "token": stage.token, "tree": stage.tree}
            taken = {name: list[float]() for name in steps}
            logits = {name: step(tree) for name, step in steps.items()}
            for _ in range(turns):
                for name, step in steps.items():
                    taken[name].append(_seconds(step, tree, device))
            apart = max(float((one - other).abs().max()) for one, other in pairwise(logits.values()))
            times = ", ".join(f"{name} {1e3 * statistics.median(each):.2f} ms" for name, each in taken.items())
            print(
                f"{length} known, {branches} branches, {len(tree.tokens)} nodes: {times}; logits differ by {apart:.1e}"
            )


def _seconds(step: Callable[[TokenTree], Tensor], tree: TokenTree, device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    began = clock()
    step(tree)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - began


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accepted", "ways"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = load(POCKET / "model", torch.device(options.device), torch.float32)
    if options.what == "accepted":
        accepted(parts, options.kinds)
    else:
        ways(parts, options.turns)


if __name__ == "__main__":
    main()
