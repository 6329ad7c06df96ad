"""What drafts gain an engine, by method, by streams and by how much a text repeats itself; tokens are compared.

    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py                       (two CPU cores, 10 minutes)
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py --methods 0 1         (the pocket model's speculators)
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py --methods ngram 0 1 --domains
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py --methods 0 0+ngram --domains --all     (as a tree)
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py --device cuda         (one GPU)

Of the pocket model in float32, by kind of prompt and number of streams:

    gain       tokens a second over those without drafts, alternately; median of the rounds, and of all together
    accepted   of the drafted tokens, how many
    a step     tokens that a sequence got from a step with drafts
    drafting   part of the time of steps with drafts in which these were made

With --domains, by what the recorded prompts are about: tokens of a sequence in a step, with drafts or without any; how
many of the drafts were accepted; of the experts of steps with drafts, how many these alone woke. Chains are as long as
there is room for then: nothing is measured.

On a CPU one thread computes, and its CPU time counts: other work on the machine does not. On a GPU it is time.
Prompts: repeated (a recorded prompt, its answer, the prompt again), plain (a recorded prompt), random (drawn tokens).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from testkit.gpu.decode_bench import Parts, answers_of, load  # noqa: E402
from testkit.gpu.decode_bench import request as ask  # noqa: E402
from testkit.pocket.answers import POCKET, recorded  # noqa: E402
from testkit.pocket.drafters import pocket_draft  # noqa: E402

from services.attention.draft_model.drafter import ModelDrafter  # noqa: E402
from services.attention.speculation.gate import NONE, Amount, Gate  # noqa: E402
from services.attention.speculation.ngram import NgramSpeculator  # noqa: E402
from services.attention.speculation.several import Several  # noqa: E402
from services.attention.speculation.speculator import Speculator  # noqa: E402
from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.engine import Engine, EngineOptions  # noqa: E402
from services.config.speculation import SpeculativeConfig  # noqa: E402
from services.messages import GenerateRequest  # noqa: E402

ANSWER = 96
KINDS = ("repeated", "plain", "random")


def prompt(kind: str, number: int, vocab: int) -> list[int]:
    record = recorded()[number % 200]
    if kind == "random":
        draw = random.Random(number)
        return [draw.randrange(1, vocab) for _ in range(48)]
    ids = list(record["prompt_ids"])
    return ids if kind == "plain" else [*ids, *record["output_ids"], *ids]


def requests(kind: str, streams: int, first: int, vocab: int) -> list[GenerateRequest]:
    return [ask(f"r{number}", prompt(kind, first + number, vocab), ANSWER) for number in range(streams)]


class Open(Gate):
    """Does not measure: chains are always as long and as many as they may be."""

    def amount(self, sequences: int) -> Amount:
        return self._amounts[-1] if sequences else NONE

    known_amount = amount


class Merging(Engine[Any]):
    """Drafts by several ``methods`` at once, in trees of a chain of each. ``drafters``: those by a model."""

    def __init__(self, methods: Sequence[str], drafters: dict[str, ModelDrafter], **parts: Any) -> None:
        self._methods, self._drafters = methods, drafters
        super().__init__(clock=lambda: 0, **parts)

    def _new_speculator(self, config: SpeculativeConfig) -> Speculator:
        found = [self._drafters[name].speculator() if name in self._drafters else None for name in self._methods]
        made = [NgramSpeculator(config) if one is None else one for one in found]
        return Several(made) if len(made) > 1 else made[0]

    def prepare(self) -> None:
        super().prepare()
        for drafter in self._drafters.values():
            drafter.prepare()

    def open(self) -> Engine[Any]:
        """Draft as much as there is room for, whatever it gains."""
        assert self._drafting is not None
        self._drafting._gate = Open(*self._drafting._gate._amounts[-1])
        return self


def engine_of(parts: Parts, method: str | None, drafts: int, branches: int = 1) -> Merging:
    """``method``: ngram, the number of a speculator, several of them with + between them, or None: no drafts."""
    device = parts.model.device
    capture = CudaCapture(device) if device.type == "cuda" else None
    methods = () if method is None else tuple(method.split("+"))
    options = EngineOptions(
        max_num_seqs=320, max_num_batched_tokens=512, kv_blocks=4096, max_model_len=512, prefix_cache=False,
        lookahead="off" if capture is None else "all",
        speculative_config=None if method is None else SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, num_branches=max(branches, len(methods))
        ),
    )  # fmt: skip
    drafts_of = {name: pocket_draft(int(name), device, parts.model.dtype) for name in methods if name != "ngram"}
    engine = Merging(
        methods, {name: draft.drafter(options, capture) for name, draft in drafts_of.items()},
        model=parts.model, link=parts.link(), options=options, capture=capture,
    )  # fmt: skip
    engine.prepare()
    return engine


def timed(engine: Engine[Any], asked: list[GenerateRequest]) -> tuple[float, dict[str, Any]]:
    clock = time.perf_counter if engine.on_gpu else time.process_time
    began = clock()
    said = answers_of(engine, asked)
    return clock() - began, said


def measure(parts: Parts, method: str, kind: str, streams: int, options: argparse.Namespace) -> str:
    vocab = parts.model.spec.vocab_size
    plain, drafting = engine_of(parts, None, 0), engine_of(parts, method, options.drafts, options.branches)
    made_s = verified_s = 0.0
    gains, same, all_tokens, seconds = [], 0, 0, {"plain": 0.0, "drafting": 0.0}
    rounds = max(options.rounds, -(-options.steps // ANSWER))
    for turn in range(rounds + 1):
        asked = requests(kind, streams, turn * streams, vocab)
        without_s, wanted = timed(plain, asked)
        with_s, said = timed(drafting, asked)
        same += sum([t for t, _ in said[name]] == [t for t, _ in wanted[name]] for name in wanted)
        all_tokens += len(wanted)
        if turn:  # the first round warms up
            gains.append(without_s / with_s)
            seconds["plain"] += without_s
            seconds["drafting"] += with_s
        times = drafting.take_durations()
        made_s, verified_s = made_s + sum(times.draftings), verified_s + sum(times.verifications)
    stats = drafting.stats()
    accepted = stats.accepted_tokens / max(1, stats.draft_tokens)
    a_step = 1 + stats.accepted_tokens / max(1, stats.draft_chains)
    part = made_s / max(1e-9, made_s + verified_s)
    return (
        f"{method:7} {kind:9} {streams:4} streams: gain {statistics.median(gains):.2f} "
        f"(whole {seconds['plain'] / seconds['drafting']:.2f}), "
        f"accepted {accepted:.2f} of {stats.draft_tokens}, a step {a_step:.2f}, drafting {part:.2f}, "
        f"steps {stats.steps} / {plain.stats().steps}, answers alike {same} of {all_tokens}"
    )


def by_domain(parts: Parts, options: argparse.Namespace) -> None:
    """Print tokens of a step with drafts, and the part of drafts that were accepted, by domain and method."""
    methods: list[str] = options.methods
    domains: dict[str, list[list[int]]] = {"all": [record["prompt_ids"] for record in recorded()]}
    for record in recorded() if not options.all else ():
        domains.setdefault(record["domain"], []).append(record["prompt_ids"])
    print("| prompts about | answers |", " | ".join(methods), "|")
    for domain, prompts in domains.items():
        cells = []
        for method in methods:
            engine = engine_of(parts, method, options.drafts, options.branches).open()
            asked = [ask(f"r{number}", list(ids), ANSWER, ignore_eos=False) for number, ids in enumerate(prompts)]
            for first in range(0, len(asked), 16):
                answers_of(engine, asked[first : first + 16])
            stats = engine.stats()
            a_step = stats.decode_tokens / (stats.decode_tokens - stats.accepted_tokens)
            accepted = 100 * stats.accepted_tokens / max(1, stats.draft_tokens)
            woken = 100 * stats.woken_experts / max(1, stats.draft_step_experts)
            cells.append(f"{a_step:.2f} ({accepted:.0f} %; {woken:.0f} %)")
        print(f"| {domain} | {len(prompts)} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--branches", type=int, default=1, help="of a tree at most")
    parser.add_argument("--methods", nargs="+", default=["ngram"], help="ngram, 0, 1, or several: 0+ngram")
    parser.add_argument("--domains", action="store_true", help="acceptance by domain, without a gate")
    parser.add_argument("--all", action="store_true", help="with --domains: all prompts at once, and no domain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps without drafts to take at least, in rounds")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = load(POCKET / "model", torch.device(options.device), torch.float32)
    if options.domains:
        by_domain(parts, options)
        return
    for method in options.methods:
        for kind in options.kinds:
            for streams in options.streams:
                print(measure(parts, method, kind, streams, options), flush=True)


if __name__ == "__main__":
    main()
