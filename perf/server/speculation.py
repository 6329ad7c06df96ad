"""What drafts by prompt lookup gain an engine, by streams and by how much a text repeats itself; tokens are compared.

    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py                       (two CPU cores, 10 minutes)
    PYTHONPATH=.:kernels:tests python3 perf/server/speculation.py --device cuda         (one GPU)

Of the pocket model in float32, by kind of prompt and number of streams:

    gain       tokens a second over those without drafts, alternately; median of the rounds, and of all together
    accepted   of the drafted tokens, how many
    a step     tokens that a sequence got from a step with drafts

On a CPU one thread computes, and its CPU time counts: other work on the machine does not. On a GPU it is time.
Prompts: repeated (a recorded prompt, its answer, the prompt again), plain (a recorded prompt), random (drawn tokens).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from testkit.gpu.decode_bench import Parts, answers_of, load  # noqa: E402
from testkit.gpu.decode_bench import request as ask  # noqa: E402
from testkit.pocket.answers import POCKET, recorded  # noqa: E402

from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.engine import Engine  # noqa: E402
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


def engine_of(parts: Parts, drafts: int, branches: int = 1) -> Engine[Any]:
    on_gpu = parts.model.device.type == "cuda"
    config = None
    if drafts:
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, num_branches=branches)
    engine = parts.engine(
        CudaCapture(parts.model.device) if on_gpu else None, lookahead="all" if on_gpu else "off", max_num_seqs=320,
        max_num_batched_tokens=512, kv_blocks=4096, max_model_len=512, prefix_cache=False, speculative_config=config,
    )  # fmt: skip
    engine.prepare()
    return engine


def timed(engine: Engine[Any], asked: list[GenerateRequest]) -> tuple[float, dict[str, Any]]:
    clock = time.perf_counter if engine.on_gpu else time.process_time
    began = clock()
    said = answers_of(engine, asked)
    return clock() - began, said


def measure(parts: Parts, kind: str, streams: int, options: argparse.Namespace) -> str:
    vocab = parts.model.spec.vocab_size
    plain, drafting = engine_of(parts, 0), engine_of(parts, options.drafts, options.branches)
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
    stats = drafting.stats()
    accepted = stats.accepted_tokens / max(1, stats.draft_tokens)
    a_step = 1 + stats.accepted_tokens / max(1, stats.draft_chains)
    return (
        f"{kind:9} {streams:4} streams: gain {statistics.median(gains):.2f} "
        f"(whole {seconds['plain'] / seconds['drafting']:.2f}), "
        f"accepted {accepted:.2f} of {stats.draft_tokens}, a step {a_step:.2f}, steps {stats.steps} / "
        f"{plain.stats().steps}, answers alike {same} of {all_tokens}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--branches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps without drafts to take at least, in rounds")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = load(POCKET / "model", torch.device(options.device), torch.float32)
    for kind in options.kinds:
        for streams in options.streams:
            print(measure(parts, kind, streams, options), flush=True)


if __name__ == "__main__":
    main()
