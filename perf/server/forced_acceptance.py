"""What chains of drafts gain where a known share of them is right: Qwen3-30B-A3B's shapes, random weights, one GPU.

    PYTHONPATH=.:kernels:tests python3 perf/server/forced_acceptance.py --device cuda
    PYTHONPATH=.:kernels:tests python3 perf/server/forced_acceptance.py --layers 1 --streams 1 2 --answer 16 --steps 32

Acceptance is forced: an engine without drafts answers first, and a speculator that costs nothing says what it answered,
but each token is replaced by another one with probability 1 - acceptance, by place. So a chain ends at
the first token that was replaced, as after a draft model of that quality. By streams and acceptance, with the gate as
it is served:

    gain       time of the answers without drafts over that with them, alternately; median of the rounds
    accepted   of the drafted tokens, how many
    a step     tokens that a sequence got from a step with drafts
    alike      answers that are those without drafts; in bfloat16 near ties differ, and drafts behind them are wrong

A step has as many rows as twice the most streams, so that the last of these leave a draft for each sequence. On a CPU
(the second command: a minute) 16 experts and 4,096 tokens in float32 show that the program runs, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from testkit.gpu.decode_bench import Parts, answers_of, qwen3_30b, random_dense, random_experts  # noqa: E402
from testkit.gpu.decode_bench import request as ask  # noqa: E402

from services.attention.sequences.sequence import SequenceState  # noqa: E402
from services.attention.speculation.speculator import OneByOne, Speculator  # noqa: E402
from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.engine import Engine, EngineOptions  # noqa: E402
from services.config.speculation import SpeculativeConfig  # noqa: E402
from services.messages import GenerateRequest  # noqa: E402
from services.model.experts import ExpertShard  # noqa: E402

PROMPT = 64
WAYS = ("plain", "drafting")


class Recorded(OneByOne):
    """Drafts recorded answers, each token replaced with probability 1 - ``acceptance``."""

    def __init__(self, vocab: int) -> None:
        self.acceptance = 1.0
        self.answers: dict[str, list[int]] = {}
        self._vocab = vocab

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        request = state.request
        known = len(state.token_ids) - request.prompt_len
        answer = self.answers.get(request.id, [])[known : known + most]
        return [self._said(f"{request.id} {known + at}", token) for at, token in enumerate(answer)]

    def forget(self, state: SequenceState) -> None:
        pass

    def _said(self, place: str, token: int) -> int:
        right = random.Random(f"{place} {self.acceptance}").random() < self.acceptance
        return token if right else (token + 1) % self._vocab


class Prompted(Engine[Any]):
    """Drafts what :attr:`recorded` says."""

    recorded: Recorded

    def _new_speculator(self, config: SpeculativeConfig) -> Speculator:
        del config
        self.recorded = Recorded(self._model.spec.vocab_size)
        return self.recorded

    def begin_anew(self) -> None:
        """Forget what the gate has learnt."""
        self._reset()


def parts_of(layers: int, device: torch.device) -> Parts:
    spec, dtype = qwen3_30b(layers), torch.bfloat16
    if device.type == "cpu":
        spec, dtype = dataclasses.replace(spec, num_experts=16, vocab_size=4096), torch.float32
    dense = random_dense(spec, device, dtype)
    return Parts(dense, ExpertShard(random_experts(spec, device, dtype), num_experts=spec.num_experts))


def engine_of(parts: Parts, drafts: int, options: argparse.Namespace) -> Prompted:
    """``drafts``: of a chain at most; 0: there are none."""
    device, most = parts.model.device, 2 * max(options.streams)
    capture = CudaCapture(device) if device.type == "cuda" else None
    longest = PROMPT + options.answer
    chosen = EngineOptions(
        max_num_seqs=most, max_num_batched_tokens=max(most, 512), kv_blocks=most * (1 + longest // 16),
        max_model_len=longest, prefix_cache=False, lookahead="off" if capture is None else "all",
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=drafts) if drafts else None,
    )  # fmt: skip
    engine = Prompted(model=parts.model, link=parts.link(), options=chosen, clock=lambda: 0, capture=capture)
    engine.prepare()
    return engine


def requests(streams: int, turn: int, options: argparse.Namespace, vocab: int) -> list[GenerateRequest]:
    draw = random.Random(turn)
    return [
        ask(f"r{turn}-{number}", [draw.randrange(1, vocab) for _ in range(PROMPT)], options.answer)
        for number in range(streams)
    ]


def measure(engines: dict[str, Prompted], streams: int, acceptance: float, options: argparse.Namespace) -> str:
    plain, drafting = (engines[way] for way in WAYS)
    recorded, vocab = drafting.recorded, drafting._model.spec.vocab_size
    recorded.acceptance, gains, alike = acceptance, [], 0
    before = drafting.stats()
    rounds = max(2, -(-options.steps // options.answer))
    for turn in range(rounds):
        asked = requests(streams, turn, options, vocab)
        began = time.perf_counter()
        wanted = {name: [token for token, _ in said] for name, said in answers_of(plain, asked).items()}
        between = time.perf_counter()
        recorded.answers = wanted
        found = {name: [token for token, _ in said] for name, said in answers_of(drafting, asked).items()}
        if turn:  # the first round warms up
            gains.append((between - began) / (time.perf_counter() - between))
            alike += sum(found[name] == wanted[name] for name in wanted)
    stats = drafting.stats()
    drafted, chains = stats.draft_tokens - before.draft_tokens, stats.draft_chains - before.draft_chains
    accepted = stats.accepted_tokens - before.accepted_tokens
    return (
        f"{streams:4} streams, {acceptance:.1f} of the drafts right: gain {statistics.median(gains):.2f} "
        f"({min(gains):.2f} to {max(gains):.2f}), accepted {accepted / max(1, drafted):.2f} of {drafted}, "
        f"a step {1 + accepted / max(1, chains):.2f}, alike {alike} of {streams * (rounds - 1)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8, 0.6, 0.0])
    parser.add_argument("--drafts", type=int, default=4, help="longest chain")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=512, help="of each size without drafts, about")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    parts = parts_of(options.layers, torch.device(options.device))
    engines = {"plain": engine_of(parts, 0, options), "drafting": engine_of(parts, options.drafts, options)}
    for acceptance in options.acceptance:
        engines["drafting"].begin_anew()
        for streams in options.streams:
            print(measure(engines, streams, acceptance, options), flush=True)


if __name__ == "__main__":
    main()
