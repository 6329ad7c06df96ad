"""What each sampling option adds to a step, on the host and on the device, with penalties looked up as they are and as
they were (row by row, from the whole list of tokens).

    PYTHONPATH=.:kernels:tests python3 perf/server/sampling_cost.py --device cuda    (one GPU, under 3 minutes)

First it checks that all edits of logits are equal to the bit both ways, also with a token that only the device knows.
Then it times draws of 1, 64 and 448 rows of 32k tokens, half of them generated, over random logits (``all`` asks for
everything at once; ``coming and going``: that, with other rows in every step); then whole steps of an engine of two
layers, launched ahead and by graph on a GPU. Medians, and ``before`` those with the edits as they were:

    host     milliseconds until a draw is launched
    device   milliseconds of the device's clock for it
    read     microseconds a row for the host to read what was drawn
    step     milliseconds from one step's tokens to the next one's
    engine   what the engine's thread did in it without waiting for the device

On a CPU host and device are one. ``--vocab 64`` leaves nothing but the host's part there.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
import time
from dataclasses import replace as changed
from types import SimpleNamespace
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import numpy as np  # noqa: E402
import torch  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from testkit.gpu.decode_bench import request  # noqa: E402
from torch import Tensor  # noqa: E402

from perf.kit.edits_before import EditsBefore  # noqa: E402
from perf.server.lookahead_gpu import random_parts, shapes  # noqa: E402
from services.attention.kv_cache import KVCache  # noqa: E402
from services.attention.sampling import filters  # noqa: E402
from services.attention.sampling.histories import Histories  # noqa: E402
from services.attention.sampling.logprobs import TokenScores  # noqa: E402
from services.attention.sampling.sampler import Sampler  # noqa: E402
from services.attention.sequences.plan import StepPlan  # noqa: E402
from services.attention.sequences.sequence import open_sequence  # noqa: E402
from services.attention.step.cuda_graphs import CudaCapture  # noqa: E402
from services.attention.step.engine import Engine  # noqa: E402
from services.model.transfer import Mark, upload  # noqa: E402

BLOCK = 16
PARTS = ["draws", "scores", "sorts", "steps"]
EDITING = {"repetition_penalty", "presence_penalty", "logit_bias", "min_tokens"}


def options(vocab: int) -> dict[str, dict[str, Any]]:
    """Largest value of each that the gateway lets through."""
    order = np.random.default_rng(1).permutation(vocab).tolist()
    bias = {token: float(token % 7 - 3) for token in order[:1024]}
    wide: dict[str, Any] = {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": bias,
        "min_tokens": 10**6, "stop_token_ids": tuple(order[-128:]), "top_p": 0.95, "top_k": 5000, "min_p": 0.01,
        "logprobs": 20, "temperature": 1.0,
    }  # fmt: skip
    return {
        "greedy": {},
        "sampled": {"temperature": 1.0},
        "top_p": {"temperature": 1.0, "top_p": 0.95},
        "top_p, flat": {"temperature": 5.0, "top_p": 0.999},
        "top_k 50": {"temperature": 1.0, "top_k": 50},
        "top_k 5000": {"temperature": 1.0, "top_k": 5000},
        "min_p": {"temperature": 1.0, "min_p": 0.05},
        "logprobs": {"logprobs": 20},
        "repetition": {"repetition_penalty": 1.1},
        "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        "logit_bias": {"logit_bias": bias},
        "min_tokens": {name: wide[name] for name in ("min_tokens", "stop_token_ids")},
        "all": wide,
        "coming and going": wide,
    }


class Batch:
    """``rows`` decoding sequences of ``context`` tokens, half of them generated, in a cache without layers."""

    def __init__(self, rows: int, context: int, vocab: int, device: torch.device) -> None:
        draw, blocks = np.random.default_rng(rows), -(-context // BLOCK) + 1
        spec: Any = SimpleNamespace(layers=(), kv_shape=(2, 1, 1), kv_bytes=lambda _: 0)
        self.kv = KVCache(spec, num_blocks=blocks * rows, block_size=BLOCK, dtype=torch.float32, device=device)
        self.histories, self.vocab, self.device = Histories(self.kv), vocab, device
        self._blocks_RM = draw.permutation(blocks * rows).reshape(rows, blocks)
        texts = draw.zipf(1.2, (min(rows, 16), context)) % vocab
        self._texts = texts.tolist()
        slots = (self._blocks_RM[:, : blocks - 1, None] * BLOCK + np.arange(BLOCK)).reshape(rows, -1)[:, :context]
        for row in range(rows):
            self.kv.write_tokens(upload(slots[row].copy(), device), upload(texts[row % 16].copy(), device))
        generator = torch.Generator(device).manual_seed(rows)
        self.logits_RV = torch.randn(rows, vocab, generator=generator, device=device) * 6

    def plan(self, sampling: dict[str, Any], *, unknown: int = 0) -> StepPlan:
        """A step of all sequences with ``sampling``; the host does not know their last ``unknown`` tokens."""
        states = []
        for row, blocks in enumerate(self._blocks_RM.tolist()):
            text = self._texts[row % 16]
            asked = request("r", text[: len(text) - unknown], 10**6, seed=row, ignore_eos=False, **sampling)
            states.append(open_sequence(replace(asked, prompt_len=len(text) // 2), row, (0,)))
            states[-1].blocks = blocks
        return StepPlan(decodes=tuple(states))

    def last_tokens(self) -> Tensor:
        return torch.tensor([self._texts[row % 16][-1] for row in range(len(self.logits_RV))], device=self.device)


def unequal(batch: Batch, sampling: dict[str, Any]) -> int:
    """Logits that differ between the edits and those before, with all tokens known and with one that is not."""
    new, old, wrong = Sampler(batch.vocab, batch.device)._edits, EditsBefore(), 0
    for ahead in (0, 1):
        plan = batch.plan(sampling, unknown=ahead)
        rows, old.after_R = [state.row for state in plan.decodes], batch.last_tokens()
        found = new.of(batch.logits_RV, rows, batch.histories.of(plan), ahead)
        wrong += int((found != old.of(batch.logits_RV, rows, None, ahead)).sum())
    return wrong


def timed(batch: Batch, sampling: dict[str, Any], *, steps: int, before: bool, moving: bool) -> dict[str, float]:
    """Medians over ``steps``, seconds: host, device, read."""
    sampler, plan = Sampler(batch.vocab, batch.device), batch.plan(sampling)
    if before:
        sampler._edits = EditsBefore()  # type: ignore[assignment]
    hosts, devices, reads = list[float](), list[float](), list[float]()
    for step in range(steps + 2):
        if moving:
            plan = StepPlan(decodes=(*plan.decodes[1:], plan.decodes[0]))
        clock = Clock(batch.device)
        began = time.perf_counter()
        history = None if before else batch.histories.of(plan)
        drawn = sampler.draw(batch.logits_RV, [state.row for state in plan.decodes], history)
        hosts.append(time.perf_counter() - began)
        devices.append(clock.stop())
        drawn = drawn.redrawn()
        began = time.perf_counter()
        drawn.outcomes()
        reads.append(time.perf_counter() - began)
        if step == 1:  # the heads that its filters need are known now
            hosts, devices, reads = [], [], []
    return {"host": statistics.median(hosts), "device": statistics.median(devices), "read": statistics.median(reads)}


class Clock:
    """Seconds of the device's time; of the host's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Waits for the device."""
        if not self._cuda:
            return time.perf_counter() - self._began
        self._events[1].record()
        torch.cuda.synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def draws(args: argparse.Namespace, device: torch.device) -> int:
    """How many logits were wrong."""
    wrong = 0
    print(
        f"{'option':>20} {'rows':>5} | {'host':>8} {'before':>8} | {'device':>8} {'before':>8} | {'read':>6}",
        flush=True,
    )
    for rows in args.rows:
        batch = Batch(rows, args.context, args.vocab, device)
        for name, sampling in options(args.vocab).items():
            moving = name == "coming and going"
            if EDITING & sampling.keys() and not moving and rows <= args.max_before:
                wrong += unequal(batch, sampling)
            new = timed(batch, sampling, steps=args.steps, before=False, moving=moving)
            edits = EDITING & sampling.keys() and rows <= args.max_before
            old = timed(batch, sampling, steps=2, before=True, moving=moving) if edits else None
            print(_line(name, rows, new, old), flush=True)
    print(f"{wrong} logits differ from those before", flush=True)
    return wrong


def _line(name: str, rows: int, new: dict[str, float], old: dict[str, float] | None) -> str:
    before = {which: f"{1e3 * old[which]:>8.2f}" if old else f"{'':>8}" for which in ("host", "device")}
    return (
        f"{name:>20} {rows:>5} | {1e3 * new['host']:>8.2f} {before['host']} | {1e3 * new['device']:>8.2f}"
        f" {before['device']} | {1e6 * new['read'] / rows:>6.1f}"
    )


def scores(args: argparse.Namespace, device: torch.device) -> None:
    """Scoring prompts: 64 rows at a time, each with 20 alternatives."""
    logits_RV = torch.randn(64, args.vocab, device=device)
    tokens_R, times = torch.arange(64, device=device), list[float]()
    for _ in range(args.steps):
        scored = TokenScores(logits_RV, tokens_R, [20] * 64).wait()
        began = time.perf_counter()
        scored.read()
        times.append(time.perf_counter() - began)
    print(f"a prompt's scores, read: {1e6 * statistics.median(times) / 64:.1f} us a row", flush=True)


def sorts(args: argparse.Namespace, device: torch.device) -> None:
    """What a top_k or top_p sorts of 64 rows, by how many of the largest logits decide it."""
    logits_RV = torch.randn(64, args.vocab, device=device)
    for width in filters.heads(args.vocab):
        whole, times = width == args.vocab, list[float]()
        for _ in range(args.steps):
            clock = Clock(device)
            logits_RV.sort(dim=-1, descending=True) if whole else logits_RV.topk(width, dim=-1)
            times.append(clock.stop())
        print(f"the largest {width} of 64 rows: {1e3 * statistics.median(times):.2f} ms", flush=True)


def steps(args: argparse.Namespace, device: torch.device) -> None:
    """Times steps of an engine whose sequences share their prompt."""
    small = device.type == "cpu"
    spec = changed(shapes(2, device), vocab_size=args.vocab, max_position=args.context + 1024)
    parts = random_parts(spec, device, torch.float32 if small else torch.bfloat16)
    prompt = (np.random.default_rng(3).zipf(1.2, args.context) % args.vocab).tolist()
    print(f"{'option':>20} {'rows':>5} | {'step':>8} {'before':>8} | {'engine':>8} {'before':>8}", flush=True)
    for rows in args.rows:
        engine = parts.engine(
            None if small else CudaCapture(device), max_num_seqs=rows, max_num_batched_tokens=max(512, 2 * rows),
            kv_blocks=args.context // BLOCK + 24 * rows + 64, block_size=BLOCK, lookahead="all",
        )  # fmt: skip
        engine.prepare()
        for name, sampling in options(args.vocab).items():
            if name == "coming and going":
                continue
            decoding = Decoding(engine, prompt, rows, sampling)
            new = decoding.timed(args.steps)
            asked, edits = EDITING & sampling.keys() and rows <= args.max_before, engine._sampler._edits
            engine._sampler._edits = EditsBefore()  # type: ignore[assignment]
            old = decoding.timed(2) if asked else None
            engine._sampler._edits = edits
            decoding.end()
            pairs = (f"{1e3 * new[at]:>8.2f} {f'{1e3 * old[at]:.2f}' if old else '':>8}" for at in (0, 1))
            print(f"{name:>20} {rows:>5} | {' | '.join(pairs)}", flush=True)


class Decoding:
    """``rows`` sequences of an engine, all past the same ``prompt``, half of which counts as generated."""

    def __init__(self, engine: Engine[Any], prompt: list[int], rows: int, sampling: dict[str, Any]) -> None:
        self._engine, self._rows, self.waited_s = engine, rows, 0.0
        self._stepper: Any = engine._steps
        self._stepper._mark = self._mark
        whole = request("r", prompt, len(prompt) // 2 + 300, **sampling)
        for row in range(rows):
            named = replace(whole, id=f"r{row}", prompt_len=len(prompt) // 2)
            engine.add(replace(named, sampling=replace(whole.sampling, seed=row)))
            if row == 0:
                self._until_all_draw(1)  # the others find what it computed
        self._until_all_draw(rows)

    def timed(self, count: int) -> tuple[float, float]:
        """Medians: seconds of a step, and of it the engine's own."""
        for _ in range(3):
            self._engine.step()
        times, own = list[float](), list[float]()
        for _ in range(count):
            waited_s, began = self.waited_s, time.perf_counter()
            events = self._engine.step()
            times.append(time.perf_counter() - began)
            own.append(times[-1] - (self.waited_s - waited_s))
            assert len(events) == self._rows
        return statistics.median(times), statistics.median(own)

    def end(self) -> None:
        for request_id, attempt in self._engine.held().items():
            self._engine.cancel(request_id, attempt)
        while self._engine.has_work:
            self._engine.step()

    def _until_all_draw(self, rows: int) -> None:
        while sum(event.token_id is not None for event in self._engine.step()) < rows:
            assert self._engine.has_work

    def _mark(self, device: torch.device) -> Any:
        mark = Mark(device)

        def wait() -> None:
            began = time.perf_counter()
            mark.wait()
            self.waited_s += time.perf_counter() - began

        return SimpleNamespace(wait=wait)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 448])
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-before", type=int, default=448, help="rows for which the edits before are run, too")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--limit", type=int, default=300, help="seconds")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    device, wrong = torch.device(args.device), 0
    print(
        f"torch {torch.__version__} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}", flush=True
    )
    with torch.inference_mode():
        if "draws" in args.parts:
            wrong = draws(args, device)
        if "scores" in args.parts:
            scores(args, device)
        if "sorts" in args.parts:
            sorts(args, device)
    if "steps" in args.parts:
        steps(args, device)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
