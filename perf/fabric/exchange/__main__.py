"""What the shared memory link does on one node: exact under churn, its speed against bare puts and NCCL, and how long
a death is felt.

    PYTHONPATH=.:kernels:tests python3 -m perf.fabric.exchange --out OUT   (2 or 4 GPUs; --device cpu: slowly)

Prints as it goes; writes results.json and, packed, the steps' times and every process's log to OUT. Ends by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perf.fabric.exchange.children import Child, Children
from perf.fabric.exchange.world import World
from services.placement.planning.layer_times import Batch, Gpus, LayerTimes, Link, Shapes

KIB = (64, 512, 4096)
TOTALS = (32, 128, 512, 2048)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._gpus = list(range(torch.cuda.device_count())) if options.device == "cuda" else [-1, -1, -1, -1]
        self._details = Path(tempfile.mkdtemp(prefix="exchange-"))
        self._children = Children(self._details, options.deadline, at_last=self._save)
        self._results: list[dict[str, Any]] = []
        self._epoch = 0
        self._memory = "vmm"
        half = len(self._gpus) // 2
        self._attention_gpus, self._expert_gpus = self._gpus[:half], self._gpus[half:]

    def run(self, lanes: Sequence[str]) -> bool:
        known: dict[str, Callable[[], None]] = {
            "pair": self.pair, "square": self.square, "modes": self.modes, "flat": self.flat, "join": self.join,
            "kill": self.kill, "nccl": self.nccl, "memory": self.memory, "crowd": self.crowd,
            "uneven": self.uneven, "clients": self.clients,
        }  # fmt: skip
        good = True
        for lane in lanes:
            print(f"--- {lane}, {self._children.left_s:.0f} s left", flush=True)
            try:
                known[lane]()
            except Exception as error:  # noqa: BLE001 - the next lane may still show something
                good = False
                traceback.print_exc(file=sys.stdout)
                self._note(lane, error=f"{type(error).__name__}: {error}")
            finally:
                self._children.end_all()
                self._expert_gpus = self._gpus[len(self._gpus) // 2 :]
                self._save()
        return good

    def memory(self) -> None:
        """Put into each kind of shared memory, kill the owner, put again. The rest uses the first kind that works."""
        if self._options.device != "cuda":
            return
        works = []
        for kind in ("vmm", "ipc"):
            try:
                self._outlives(kind)
                works.append(kind)
            except Exception as error:  # noqa: BLE001 - that is the finding
                self._note("memory", kind=kind, error=f"{type(error).__name__}: {error}")
            self._children.end_all()
        self._memory = works[0] if works else "vmm"

    def _outlives(self, kind: str) -> None:
        owner, writer = (
            self._children.start(f"{name}-{kind}", "lifetime", gpu=gpu, memory=kind)
            for name, gpu in (("owner", self._expert_gpus[0]), ("writer", self._attention_gpus[0]))
        )
        shared, _ = owner.answer(40), writer.answer(40)
        opened = writer.ask(20, do="open", handle=shared["handle"])
        writer.ask(20, do="write")
        found = owner.ask(20, do="sum")["sum"]
        owner.kill()
        began = time.time()
        code = owner.wait(20)
        gone_ms = (time.time() - began) * 1e3
        alive = [writer.ask(20, do="write")["alive"] for _ in range(3)][-1]
        closed = writer.ask(20, do="close")
        self._note(
            "memory", kind=kind, found=found, exit=code, gone_ms=gone_ms, alive_after=alive, share_ms=shared["ms"],
            open_ms=opened["ms"], close_ms=closed["ms"],
        )  # fmt: skip

    def pair(self) -> None:
        """One attention worker, one seat: round trips of a size against bare ones of the same size."""
        bare = self._bare() if self._options.device == "cuda" else dict.fromkeys(KIB, -1.0)
        world = World(hidden=4096, rows=max(KIB) // 8, compute="pass", groups=1)
        attention, _ = self._start(world, [0], attentions=1)
        for kib in KIB:
            attention[0].ask(do="capture", rows=[kib // 8], check=False)
            found = attention[0].ask(do="run", label=f"pair-{kib}", steps=60)
            ratio = found["exchange_us"] / bare[kib]
            self._note("pair", kib=kib, bare_us=bare[kib], ratio=ratio, **_short(found))

    def square(self) -> None:
        """Two attention workers, two seats of two groups: every row goes to both."""
        if len(self._gpus) < 4:
            return
        sizes = self._options.square_kib or KIB
        world = World(hidden=4096, rows=max(sizes) // 8, compute="pass", groups=2)
        attention, _ = self._start(world, [0, 1], attentions=2)
        for kib in sizes:
            for worker in attention:
                worker.send(do="capture", rows=[kib // 8], check=False)
            for worker in attention:
                worker.answer()
            for worker in attention:
                worker.send(do="run", label=f"square-{kib}", steps=60)
            for found in [worker.answer() for worker in attention]:
                self._note("square", kib=kib, **_short(found))

    def flat(self) -> None:
        """Unsummed answers in float32 against a LocalLink of the same weights; summed ones, too."""
        for unsummed, groups in ((True, 2), (True, 1), (False, 2)):
            world = World(
                hidden=512, width=128, experts=16, slots=4, layers=4, groups=groups, rows=64, dtype="float32",
                unsummed=unsummed, compute="shard",
            )  # fmt: skip
            attention, _ = self._start(world, list(range(groups)), attentions=1)
            for rows in (1, 17, 64):
                found = attention[0].ask(do="local", rows=rows)
                self._note("flat", unsummed=unsummed, groups=groups, rows=rows, **found)
            self._children.end_all()

    def crowd(self) -> None:
        """Time experts alone, four at once, and with kernels that wait on the same GPU."""
        child = self._children.start("crowd", "crowd", gpu=self._gpus[-1])
        while "end" not in (found := child.answer(60)):
            self._note("crowd", **found)

    def clients(self) -> None:
        """Several attention workers at one seat, all on one GPU, whose attention is a pause: alone and together."""
        child = self._children.start("clients", "clients", gpu=self._gpus[-1], totals=self._options.totals)
        while "end" not in (found := child.answer(200)):
            self._note("clients", **found)

    def join(self) -> None:
        """Two replicas; a third joins, on a GPU of its own if there is one, and the first leaves while steps run."""
        world = World(hidden=2048, rows=64, groups=1)
        self._expert_gpus = self._gpus[1:]  # run() puts them back
        attention, seats = self._start(world, [0, 0], attentions=1)
        self._odd_shapes(attention)
        attention[0].send(do="run", label="join")
        time.sleep(0.5)
        self._mark(attention, "calm")
        time.sleep(2.0)
        self._mark(attention, "third starts")
        third = self._start_seat(world, 2, 0)
        seats.append(third.answer(90) | {"child": third})
        self._mark(attention, "join of a third")
        self._publish(attention, seats)
        time.sleep(3.0)
        self._mark(attention, "joined")
        time.sleep(1.0)
        self._mark(attention, "leave by SIGTERM")
        gone = seats.pop(0)
        self._publish(attention, seats)
        time.sleep(0.1)
        gone["child"].terminate()
        self._note("join", what="leave", exit=gone["child"].wait(20))
        time.sleep(1.0)
        self._report_runs("join", attention)

    def kill(self) -> None:
        """Two replicas, each used by an attention worker; kill -9 of one at a random moment, again and again. The next
        kill comes when a newcomer shares memory with everybody."""
        world = World(hidden=2048, rows=64, groups=1)
        half = len(self._gpus) // 2
        attention, seats = self._start(world, [0, 0], attentions=half)
        starting = [self._start_seat(world, 2 + at, 0) for at in range(self._options.kills + 2)]
        self._odd_shapes(attention)
        for worker in attention:
            worker.send(do="run", label="kill")
        time.sleep(0.5)
        self._mark(attention, "others start")
        killed = []
        for kill in range(self._options.kills):
            victim = seats[0]  # on one GPU and the other, in turn
            if (newcomer := self._newcomer(starting, self._gpu_of(victim))) is None:
                break
            self._mark(attention, f"kill {kill}")
            time.sleep(random.random() * 0.05)
            killed.append((time.time(), victim["seat"]))
            victim["child"].kill()
            time.sleep(0.3)
            self._mark(attention, f"newcomer {kill}")
            seats.remove(victim)
            seats.append(newcomer)
            self._publish(attention, seats)
            self._note("kill", kill=kill, shared_after_s=self._all_shared(attention, seats))
        self._mark(attention, "calm")
        time.sleep(1.5)
        self._report_runs("kill", attention, killed)

    def _newcomer(self, starting: list[Child], gpu: int, seconds: float = 60.0) -> dict[str, Any] | None:
        """The next seat of that GPU to be ready."""
        until = time.time() + min(seconds, self._children.left_s - 60)
        while time.time() < until:
            for child in starting:
                if child.gpu == gpu and child.answered():
                    starting.remove(child)
                    return child.answer() | {"child": child}
            time.sleep(0.05)
        return None

    def _all_shared(self, attention: Sequence[Child], seats: Sequence[dict[str, Any]], seconds: float = 20.0) -> float:
        """Seconds until every attention worker shares memory with every seat."""
        began, wanted = time.time(), {seat["seat"] for seat in seats}
        while time.time() < began + seconds:
            if all(wanted <= set(worker.ask(do="shared")["shared"]) for worker in attention):
                break
            time.sleep(0.02)
        return time.time() - began

    def modes(self) -> None:
        """A layer of Qwen3-30B-A3B's shapes, microseconds: all GPUs with both parts, or half of them with each."""
        shapes = {"layers": 6, "compute": "shard"}
        half = len(self._gpus) // 2
        totals = [total for total in self._options.totals if total >= 2 * len(self._gpus)]
        found: dict[tuple[str, int], float] = {}
        self._options.deadline_ms = 500  # for lanes after this one, too
        separate = World(**shapes, groups=half, rows=max(totals) // half)
        workers, _ = self._start(separate, list(range(half)), attentions=half)
        for total in totals:
            rows = total // half
            found["disaggregated", total] = self._layer_us("disaggregated", workers, [rows])
            found["pingpong", total] = self._layer_us("pingpong", workers, [rows // 2, rows - rows // 2])
        self._children.end_all()
        together = World(**shapes, groups=len(self._gpus), rows=max(totals) // len(self._gpus), micro_batches=1)
        workers = [
            self._children.start(
                f"both-{at}", "attention", gpu=gpu, world=asdict(together), memory=self._memory, out=str(self._details),
                deadline_ms=500, unavailable_s=4.0, seat=at, group=at, shared_gpu=True,
            )
            for at, gpu in enumerate(self._gpus)
        ]  # fmt: skip
        seats = [worker.answer(90) for worker in workers]
        self._attach(workers, seats)
        for total in totals:
            rows = total // len(self._gpus)
            found["colocated", total] = self._layer_us("colocated", workers, [rows], shared_gpu=True)
        for total in totals:
            row = {mode: found[mode, total] for mode in ("colocated", "disaggregated", "pingpong")}
            self._note("modes", total=total, **row, planner=_planned(len(self._gpus), half, total))
        for total in totals[:2]:  # last: they may not end
            us = self._layer_us("many wait", workers, [total // len(self._gpus)])
            self._note("modes", total=total, colocated_all_wait=us)
        self._profile(workers, totals[:2][-1], "all wait")
        self._layer_us("colocated", workers, [totals[:2][-1] // len(self._gpus)], shared_gpu=True)
        self._profile(workers, totals[:2][-1], "one waits")

    def uneven(self) -> None:
        """The disaggregated modes with one GPU for attention: a split that the planner prefers."""
        experts = len(self._gpus) - 1
        self._expert_gpus = self._gpus[1:]
        self._options.deadline_ms = 500
        world = World(layers=6, compute="shard", groups=experts, rows=max(self._options.totals))
        workers, _ = self._start(world, list(range(experts)), attentions=1)
        for total in self._options.totals:
            found = {
                "disaggregated": self._layer_us("disaggregated", workers, [total]),
                "pingpong": self._layer_us("pingpong", workers, [total // 2, total - total // 2]),
            }
            self._note("uneven", total=total, **found, planner=_planned(len(self._gpus), 1, total))

    def _profile(self, workers: Sequence[Child], total: int, what: str) -> None:
        """The kernels of the first worker's GPU while all of them run."""
        if self._options.device != "cuda":
            return
        for worker in workers[1:]:
            worker.send(do="run", label="profile", seconds=4.0)
        time.sleep(0.2)
        workers[0].send(do="profile")
        for worker in reversed(workers):
            answer = worker.any_answer()
        self._note("profile", total=total, what=what, **answer)

    def _layer_us(self, mode: str, workers: Sequence[Child], rows: list[int], shared_gpu: bool = False) -> float:
        """Microseconds of a layer, of the slowest worker; -1 if one failed."""
        began = time.time()
        capture: dict[str, Any] = {"do": "capture", "rows": rows, "dense": True, "shared_gpu": shared_gpu}
        for command in (capture, {"do": "run", "label": f"modes-{mode}-{rows[0]}", "steps": 30}):
            for worker in workers:
                worker.send(**command)
            answers = [worker.any_answer() for worker in workers]
            if errors := [answer["error"] for answer in answers if "error" in answer]:
                self._note("layer", mode=mode, rows=rows, error=errors[0])
                return -1.0
        shown = [(round(found["exchange_us"], 1), found["again"], found["errors"]) for found in answers]
        self._note("layer", mode=mode, rows=rows, took_s=time.time() - began, us_again_errors=shown)
        return max(float(found["exchange_us"]) for found in answers)

    def _attach(self, workers: Sequence[Child], seats: Sequence[dict[str, Any]]) -> None:
        self._publish(workers, seats)
        for worker in workers:
            worker.send(do="attach", seats=len(seats))
        for worker in workers:
            worker.answer(90)

    def _gpu_of(self, seat: dict[str, Any]) -> int:
        return self._expert_gpus[seat["seat"] % len(self._expert_gpus)]

    def _odd_shapes(self, attention: Sequence[Child]) -> None:
        for worker in attention:
            odd = worker.ask(do="exact", rows=[[1], [7], [64], [5, 3], [64, 64], [33, 1], [65], [200]])
            self._note("exact", what="odd shapes", **odd)
            worker.ask(do="capture", rows=[64])

    def _report_runs(self, lane: str, attention: Sequence[Child], killed: Sequence[tuple[float, int]] = ()) -> None:
        for worker in attention:
            worker.send(do="stop")
        for at, found in enumerate([worker.answer() for worker in attention]):
            windows = found["windows"]
            gaps = [window["max_ms"] for text, window in windows.items() if text.startswith("kill")]
            self._note(lane, what=f"attention {at}", longest_gaps_ms=[round(gap, 2) for gap in gaps], **_short(found))
            for text, window in windows.items():
                if not text.startswith("kill"):
                    self._note(lane, what=text, **window)
            self._report_phases(at, found, killed)
            self._results.append({"lane": lane, "what": "slow steps", "worker": at, "steps": found["slow"]})

    def _report_phases(self, worker: int, found: dict[str, Any], killed: Sequence[tuple[float, int]]) -> None:
        """Milliseconds after each kill at which this attention worker saw the connection end, and so on; in the first
        place the longest step that ended within the next 300 ms."""
        for kill, (when, seat) in enumerate(killed):
            phases = [(round((at - when) * 1e3, 2), text) for at, text in found["phases"] if -0.01 < at - when < 2.0]
            gap = found["windows"].get(f"kill {kill}", {}).get("max_ms", -1.0)
            self._note("phases", kill=kill, worker=worker, seat=seat, gap_ms=gap, phases=phases)

    def nccl(self) -> None:
        if self._options.device != "cuda":
            return
        port = random.randrange(20000, 30000)
        ranks = len(self._gpus)
        children = [
            self._children.start(f"nccl-{rank}", "nccl", gpu=gpu, rank=rank, ranks=ranks, port=port, kib=list(KIB))
            for rank, gpu in enumerate(self._gpus)
        ]
        while (found := children[0].answer(60))["what"] != "end":
            self._note("nccl", **found)

    def _bare(self) -> dict[int, float]:
        """Microseconds of a bare round trip by size, the median."""
        ends = [
            self._children.start(
                f"bare-{at}", "bare", gpu=gpu, memory=self._memory, asks=at == 0, max_kib=max(KIB), trips=48
            )
            for at, gpu in enumerate((self._attention_gpus[0], self._expert_gpus[0]))
        ]
        handles = [end.answer()["handle"] for end in ends]
        for end, handle in zip(ends, reversed(handles), strict=True):
            end.send(handle=handle)
        found = {}
        for kib in KIB:
            for end in ends:
                end.send(do="capture", kib=kib)
            for end in ends:
                end.answer()
            times = []
            for _ in range(30):
                for end in reversed(ends):
                    end.send(do="go")
                times.append(ends[0].answer()["us"])
                ends[1].answer()
            found[kib] = sorted(times)[len(times) // 2]
        self._children.end_all()
        return found

    def _start(self, world: World, groups: Sequence[int], attentions: int) -> tuple[list[Child], list[dict[str, Any]]]:
        began = time.time()
        children = [self._start_seat(world, seat, group) for seat, group in enumerate(groups)]
        attention = [
            self._children.start(
                f"attention-{at}-{world.compute}-{world.rows}-{world.groups}-{int(world.unsummed)}", "attention",
                gpu=self._attention_gpus[at], world=asdict(world), memory=self._memory, out=str(self._details),
                deadline_ms=self._options.deadline_ms,
            )
            for at in range(attentions)
        ]  # fmt: skip
        seats = [child.answer(90) | {"child": child} for child in children]
        for worker in attention:
            worker.answer(90)
        self._attach(attention, seats)
        print(f"started in {time.time() - began:.1f} s", flush=True)
        return attention, seats

    def _start_seat(self, world: World, seat: int, group: int) -> Child:
        gpu = self._gpu_of({"seat": seat})
        name = f"experts-{seat}-{world.compute}-{world.rows}-{world.groups}-{int(world.unsummed)}"
        return self._children.start(
            name, "experts", gpu=gpu, seat=seat, group=group, world=asdict(world), memory=self._memory
        )

    def _publish(self, attention: Sequence[Child], seats: Sequence[dict[str, Any]]) -> None:
        self._epoch += 1
        listed = [{name: seat[name] for name in ("seat", "group", "port")} for seat in seats]
        for worker in attention:
            worker.send(do="table", epoch=self._epoch, seats=listed)

    def _mark(self, attention: Sequence[Child], text: str) -> None:
        for worker in attention:
            worker.send(do="mark", text=text)

    def _note(self, lane: str, **facts: Any) -> None:
        self._results.append({"lane": lane, "at": time.time(), **facts})
        shown = {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in facts.items()}
        print(lane, json.dumps(shown), flush=True)

    def _save(self) -> None:
        machine = {"torch": torch.__version__, "gpus": len(self._gpus), "argv": sys.argv[1:]}
        if self._options.device == "cuda":
            machine["gpu"] = torch.cuda.get_device_name(0)
        (self.out / "results.json").write_text(json.dumps({"machine": machine, "results": self._results}, indent=1))
        with tarfile.open(self.out / "details.tar.gz", "w:gz") as packed:
            packed.add(self._details, "details")


def _planned(gpus: int, attentions: int, total: int) -> dict[str, float]:
    """Microseconds by the planner's equations with an H200's rates and the exchange of this transport."""
    link = Link(bandwidth=295e9, latency=4.1e-6, joined=False)
    layer = LayerTimes(
        Shapes(hidden=2048, expert_width=768, experts=128, top_k=8, layers=48, dense_weights=19_398_656),
        link,
        Gpus(count=gpus, bandwidth=4.3e12, flops=790e12, memory=140e9),
        Batch(tokens=total),
    )
    disaggregated, pingpong = layer.disaggregated(attentions)
    found = {"colocated": layer.colocated(gpus, link), "disaggregated": disaggregated, "pingpong": pingpong}
    return {mode: round(1e6 * seconds, 1) for mode, seconds in found.items()}


def _short(found: dict[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in found.items() if name not in ("slow", "marks", "windows", "phases")}


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="perf.fabric.exchange")
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lanes", default="memory,pair,kill,join,flat,square,nccl,modes")
    parser.add_argument("--deadline", type=float, default=270.0, help="seconds, of the whole run")
    parser.add_argument("--deadline-ms", type=float, default=20.0, help="of one exchange")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--square-kib", type=_integers, default=[])
    parser.add_argument("--totals", type=_integers, default=list(TOTALS), help="batches of all GPUs, for modes")
    options = parser.parse_args()
    return 0 if Bench(options).run(options.lanes.split(",")) else 1


if __name__ == "__main__":
    sys.exit(main())
