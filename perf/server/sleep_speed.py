"""How long an attention worker takes to fall asleep and to wake up, and how much memory is free meanwhile.

    PYTHONPATH=.:kernels:tests python3 -m perf.server.sleep_speed [--model FOLDER] [--layers 2] [--dir DIR]
        [--device cpu] [--dtype bfloat16] [--kv-memory-gib 1] [--rounds 3] [--json FILE]

The model of FOLDER or, without one, a checkpoint of OLMoE's shapes with random values that it writes into DIR. All
weights are in one process (--layout local). Each round sleeps at level 1 and at level 2 and wakes up; a few tokens are
computed before each sleep, and must be the same after it. ``load`` is a start without the page cache being cold:
reading weights, the KV cache, CUDA graphs. Memory is the process's resident memory, on a GPU what the driver says is
used of it. The exit code is 1 where an answer differs or a sleep at level 2 frees less than 80 % of the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import psutil  # noqa: E402
import torch  # noqa: E402
from testkit.models.engines import ask, run, tokens  # noqa: E402

from perf.server.load_speed import write_checkpoint  # noqa: E402
from perf.server.offline import olmoe  # noqa: E402
from services.attention.setup.build import Built, build  # noqa: E402
from services.attention.sleep import EngineSleep  # noqa: E402
from services.config import DenseFormat, ExpertFormat, Settings  # noqa: E402
from services.model.sleep import RememberedWeights  # noqa: E402
from services.model.spec import ModelSpec  # noqa: E402
from services.model.weight_source import FromCheckpoint, Tensors, WeightSource  # noqa: E402

LEAST_FREED = 0.8
PROMPTS = [[7 * number + at for at in range(1, 30)] for number in range(4)]


@dataclass(frozen=True, slots=True)
class Written:
    """The checkpoint that :func:`write_checkpoint` wrote, which has no config.json."""

    written: ModelSpec

    def spec(self, folder: Path, expert_format: ExpertFormat, dense_format: DenseFormat = "dense") -> ModelSpec:
        del folder, expert_format, dense_format
        return self.written

    def open(self, folder: Path, spec: ModelSpec, device: torch.device) -> AbstractContextManager[Tensors]:
        return FromCheckpoint().open(folder, spec, device)


def used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return int(psutil.Process().memory_info().rss)


def answers(built: Built[Any]) -> list[list[int]]:
    asked = [ask(str(number), prompt, 8, ignore_eos=True) for number, prompt in enumerate(PROMPTS)]
    found = run(built.engine, *asked)
    return [tokens(found[each.id]) for each in asked]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass
class Round:
    sleep_s: float
    wake_s: float
    freed_bytes: int
    same: bool


def measure(built: Built[Any], sleep: EngineSleep, level: int, wanted: list[list[int]]) -> Round:
    device = built.served.device
    before = used_bytes(device)
    sleep_s = timed(lambda: sleep.free(level))
    freed = before - used_bytes(device)
    wake_s = timed(lambda: (sleep.restore(), sleep.prepare()))
    return Round(sleep_s, wake_s, freed, answers(built) == wanted)


def main() -> int:
    given = _parser().parse_args()
    folder, source = _model(given)
    settings = Settings(
        model=folder, layout="local", device=given.device, dtype=given.dtype, kv_memory_gib=given.kv_memory_gib
    )
    remembered, made = RememberedWeights(source), {}
    load_s = timed(lambda: made.update(built=build(settings, lambda: 0, worker="w", weights=remembered)))
    built: Built[Any] = made["built"]
    load_s += timed(built.engine.prepare)
    sleep = EngineSleep(built.engine, remembered, built.served.device, built.engine.prepare)
    wanted, weights = answers(built), remembered.memory().nbytes
    print(f"weights {weights / 1e9:.2f} GB, KV cache {built.plan.kv_bytes / 1e9:.2f} GB; load {load_s:.2f} s")
    report: dict[str, Any] = {"weights": weights, "kv": built.plan.kv_bytes, "load_s": load_s, "levels": {}}
    good = True
    for level in (1, 2):
        rounds = [measure(built, sleep, level, wanted) for _ in range(given.rounds)]
        row = {
            name: statistics.median(getattr(each, name) for each in rounds)
            for name in ("sleep_s", "wake_s", "freed_bytes")
        }
        report["levels"][level] = row
        good &= all(each.same for each in rounds)
        good &= level < 2 or row["freed_bytes"] > LEAST_FREED * weights
        print(
            f"level {level}: asleep after {row['sleep_s']:.3f} s, awake after {row['wake_s']:.3f} s, "
            f"{row['freed_bytes'] / 1e9:.2f} GB free; same answers: {all(each.same for each in rounds)}"
        )
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    return 0 if good else 1


def _model(given: argparse.Namespace) -> tuple[Path, WeightSource]:
    if given.model is not None:
        return given.model, FromCheckpoint()
    spec = olmoe()
    spec = replace(spec, layers=spec.layers[: given.layers])
    folder = given.dir / f"olmoe-{given.layers}"
    if not folder.exists():
        partial_folder = given.dir / f"olmoe-{given.layers}-partial"
        shutil.rmtree(partial_folder, ignore_errors=True)
        write_checkpoint(partial_folder, spec)
        partial_folder.rename(folder)
    return folder, Written(spec)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dir", type=Path, default=Path("/tmp"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory-gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
