"""The lane between GPUs: what it promises and what it costs, on 2 GPUs, in under two minutes.

    PYTHONPATH=.:kernels:tests python perf/fabric/nccl_lane.py --out DIR              (GPU 0 attention, GPU 1 experts)
    PYTHONPATH=.:kernels:tests python perf/fabric/nccl_lane.py --lane gloo --quick     (the same on a CPU)

Needs torch with NCCL, triton and msgspec. Ends itself after ``--limit`` seconds. Exit code 1 if a part failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from perf.kit import nccl_bench as kit
from perf.kit.nccl_bench import EXPERTS, HIDDEN, IDENTITY, RANDOM, SCALED, SCALES, WIDE
from perf.kit.nccl_load import Load
from perf.kit.nccl_processes import Process, Report, quantiles
from services.fabric.local import LocalLink
from services.fabric.nccl.lanes import Lanes
from services.fabric.nccl.weights import checksum, fetch
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.server import ExpertServer
from services.model.experts import ExpertShard
from services.routing import Seat


class Bench:
    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self.lane, self.report, self.quick = arguments.lane, report, arguments.quick
        self.device = kit.device_of(self.lane, arguments.gpus[0])
        self.layers, self.mib = (2, 1) if self.quick else (4, 512)
        worker = (
            "worker",
            "--lane",
            self.lane,
            "--gpus",
            arguments.gpus[1],
            "--layers",
            self.layers,
            "--mib",
            self.mib,
        )
        self.processes = [Process(__file__, *worker, "--seat", number) for number in range(3)]
        self.port = arguments.port
        self.pair: kit.BarePair | None = None
        self.bare = Process(__file__, "bare", "--lane", self.lane, "--gpus", arguments.gpus[1], "--port", self.port)
        self.groups = kit.groups_on(self.lane, arguments.gpus[0])
        self.lanes = Lanes(self.groups)
        shard = ExpertShard(kit.small_model(self.device), num_experts=EXPERTS)
        self.local = LocalLink(shard.by_layer(), num_experts=EXPERTS)

    def seats(self) -> None:
        kit.warm(ExpertShard(kit.small_model(self.device), num_experts=EXPERTS), self.device)
        found = [kit.seat(process, number) for number, process in enumerate(self.processes)]
        self.small, self.wide = [seat for seat, _ in found], [seat for _, seat in found]

    # contract

    def contract(self, link: TcpLink, name: str) -> None:
        checks = 0
        for seed, (rows, slots) in enumerate([(1, 1), (7, 2), (40, 4), (333, 8), (2000, 4)]):
            x_TD, ids_TK, weights_TK = kit.rows_of(rows, slots, seed, self.device)
            dyadic_TK = torch.full_like(weights_TK, 1 / slots)
            assert torch.equal(link.combine(link.dispatch(IDENTITY, x_TD, ids_TK, dyadic_TK)), x_TD), "identity"
            y_TD = link.combine(link.dispatch(SCALED, x_TD, ids_TK, dyadic_TK))
            scale_T1 = (torch.tensor(SCALES, device=self.device)[ids_TK] * dyadic_TK).sum(1, keepdim=True)
            assert torch.equal(y_TD, x_TD * scale_T1), "scaled rows"
            for layer in (SCALED, RANDOM):
                y_TD = link.combine(link.dispatch(layer, x_TD, ids_TK, weights_TK))
                expected_TD = self.local.combine(self.local.dispatch(layer, x_TD, ids_TK, weights_TK))
                difference = float((y_TD - expected_TD).abs().max())
                if not torch.equal(y_TD, expected_TD):
                    self.report(
                        f"{name}: not LocalLink to the bit", layer=layer, rows=rows, slots=slots, max=difference
                    )
                torch.testing.assert_close(y_TD, expected_TD, atol=2e-3, rtol=2e-3)
            checks += 4
        handles = [(link.dispatch(SCALED, *kit.rows_of(rows, 2, rows, self.device)), rows) for rows in (5, 12, 70)]
        for handle, rows in reversed(handles):
            x_TD, ids_TK, weights_TK = kit.rows_of(rows, 2, rows, self.device)
            expected_TD = self.local.combine(self.local.dispatch(SCALED, x_TD, ids_TK, weights_TK))
            torch.testing.assert_close(link.combine(handle), expected_TD, atol=2e-3, rtol=2e-3)
        x_TD, ids_TK, weights_TK = kit.rows_of(6, 3, 1, self.device)
        ids_TK[0], ids_TK[1:4, 1] = -1, -1
        assert (link.combine(link.dispatch(SCALED, x_TD, ids_TK, weights_TK))[0] == 0).all(), "absent slots"
        nothing = link.combine(link.dispatch(SCALED, x_TD[:0], ids_TK[:0], weights_TK[:0]))
        assert nothing.shape == (0, HIDDEN), "no rows"
        assert nothing.device == self.device, "device"
        self.report(f"contract, {name}", checks=checks + 5, holds=True)

    def contracts(self) -> None:
        began = time.perf_counter()
        with kit.linked(kit.table(self.small[:1]), self.lanes) as link:
            self.report("one seat usable", seconds=f"{time.perf_counter() - began:.3f}", lane=self.has_lane(link))
            assert all(self.has_lane(link)), "no lane"
            self.contract(link, "one seat")
        began = time.perf_counter()
        halves = [_of_group(self.small[0], 0), _of_group(self.small[1], 1), _of_group(self.small[2], 1)]
        with kit.linked(kit.table(halves, cut=2), self.lanes) as link:
            self.report(
                "three seats of one GPU usable", seconds=f"{time.perf_counter() - began:.3f}", lane=self.has_lane(link)
            )
            self.contract(link, "two groups, three seats")

    def mixed(self) -> None:
        """Half of the experts on the other GPU, half on the CPU, whose rows go in frames."""
        cpu = ExpertShard(kit.small_model(torch.device("cpu")), num_experts=EXPERTS)
        ids = dict.fromkeys((IDENTITY, SCALED, RANDOM), range(EXPERTS))
        facts = {"hello": kit.hello(HIDDEN, "float32", 9), "secret": kit.SECRET, "timing": kit.TIMING}
        server = ExpertServer(cpu.forward, experts=ids, **facts)
        server.start()
        host, port = server.address
        on_cpu = Seat(number=9, worker="experts-9", group=1, host=host, port=port)
        with kit.linked(kit.table([_of_group(self.small[1], 0), on_cpu], cut=2), self.lanes) as link:
            self.report("a seat of a GPU and one of the CPU usable", lane=self.has_lane(link))
            self.contract(link, "a GPU and the CPU")
        server.close()

    @staticmethod
    def has_lane(link: TcpLink) -> list[bool]:
        return [seat.lane for seat in link._seats.links.values()]

    # figures

    def trip(self, link: TcpLink, rows: int) -> None:
        x_TD = torch.randn(rows, WIDE, device=self.device).bfloat16()
        ids_TK, weights_TK = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
        ids_TK, weights_TK = ids_TK.to(self.device), weights_TK.to(self.device)

        def once() -> Tensor:
            y_TD = link.combine(link.dispatch(kit.ECHO, x_TD, ids_TK, weights_TK))
            if y_TD.is_cuda:
                torch.cuda.synchronize(self.device)
            return y_TD

        assert torch.equal(once(), x_TD), "echo"
        times = 200 if rows <= 64 else 100 if rows <= 512 else 15
        name = "nccl lane" if self.has_lane(link)[0] else "tcp frames"
        name = name.replace("nccl", self.lane)
        figures = quantiles(once, 3 if self.quick else times if self.has_lane(link)[0] else times // 3, 2)
        self.report(f"round trip, {name}", KiB=rows * WIDE * 2 >> 10, **figures)

    def trips(self) -> None:
        sizes = (8, 64) if self.quick else (8, 64, 512, 8192)
        for lanes in (self.lanes, None):
            with kit.linked(kit.table(self.wide[:1], wide=True), lanes, wide=True) as link:
                for rows in sizes:
                    self.trip(link, rows)

    def bare_trips(self) -> None:
        pair = kit.BarePair(self.lane, 0, 0, self.port, self.groups)
        self.report("bare groups of two, both directions", create_s=pair.times[0], first_use_s=pair.times[1])
        for size in (65536, 524288) if self.quick else (65536, 524288, 4 << 20, 64 << 20):
            times = 5 if self.quick else 200 if size < 1 << 20 else 30
            self.bare.write(f"{size} {times + 5}")
            self.bare.hear("go")
            sent = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
            came = torch.zeros_like(sent)

            def once(sent: Tensor = sent, came: Tensor = came) -> None:
                pair.send(sent)
                pair.receive(came)

            figures = quantiles(once, times, 5)
            assert torch.equal(sent, came), "bare echo"
            self.report("round trip, bare send and receive", KiB=size >> 10, **figures)
        self.pair = pair

    def bare_abort(self) -> None:
        """Last, as it may leave the device stuck: a receive waits for a peer that is dead."""
        assert self.pair is not None, "no bare pair"
        self.bare.kill()
        time.sleep(0.3)
        if self.lane == "nccl":
            self.pair.receive(torch.zeros(1 << 20, dtype=torch.uint8, device=self.device), wait=False)
            time.sleep(0.1)
        began = time.perf_counter()
        seconds = self.pair.abort(10)
        assert seconds is not None, "not ended after 10 s"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        after = time.perf_counter() - began
        self.report("abort of both groups, the peer killed", seconds=f"{seconds:.3f}", device_idle_s=f"{after:.3f}")

    def weights(self) -> None:
        facts = Facts(
            hello=kit.hello(WIDE, "bfloat16"), secret=kit.SECRET, timing=kit.TIMING, max_bytes=kit.MAX_BYTES,
            lanes=self.lanes,
        )  # fmt: skip
        wanted = {layer: range(EXPERTS) for layer in range(self.layers)}
        forms = {
            layer: {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
            for layer, shapes in kit.shapes_of(self.layers, self.mib).items()
        }
        for attempt in range(2):
            began = time.perf_counter()
            got = fetch(self.wide[2], facts, wanted, forms)
            seconds = time.perf_counter() - began
            nbytes = sum(tensor.nbytes for layer in got.values() for tensor in layer.values())
            self.report("weights to a joining worker, with connection, lane, checksums", attempt=attempt,
                        MiB=nbytes >> 20, seconds=f"{seconds:.3f}", GB_s=f"{nbytes / seconds / 1e9:.2f}")  # fmt: skip
        tensor = got[0]["w"]
        figures = quantiles(lambda: checksum(tensor), 5, 1)
        self.report("checksum", MiB=tensor.nbytes >> 20, GB_s=f"{tensor.nbytes / figures['p50_us'] / 1e3:.1f}")

    # death

    def death(self) -> None:
        with kit.linked(kit.table(self.small[:2]), self.lanes) as link:
            load = Load(link, self.device)
            load.start()
            load.wait(60)
            self.processes[0].kill()
            killed = time.monotonic()
            load.wait(60)
            gap = load.longest()
            self.report("kill -9 under load", longest_combine_ms=f"{gap * 1e3:.1f}", usable=link.usable(),
                        sums_checked=load.count, error=load.error)  # fmt: skip
            link.apply(kit.table(self.small[1:3], epoch=2))
            joined = kit.wait_usable(link, 2)
            load.wait(60)
            figures = {"longest_combine_ms": f"{load.longest() * 1e3:.1f}", "usable_s": f"{joined:.3f}"}
            since_s = f"{time.monotonic() - killed:.2f}"
            self.report("a third joins under load", usable=link.usable(), since_kill_s=since_s, **figures)
            self.processes[1].kill()
            load.wait(60)
            self.report("kill -9 again", longest_combine_ms=f"{load.longest() * 1e3:.1f}", usable=link.usable())
            load.stop.set()
            load.join(20)
            assert load.error is None, load.error


def _of_group(seat: Seat, group: int) -> Seat:
    return Seat(number=seat.number, worker=seat.worker, group=group, host=seat.host, port=seat.port)


def measure(arguments: argparse.Namespace) -> int:
    report, ends_at = Report(arguments.out), time.monotonic() + arguments.limit - 4
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ""
    report("machine", torch=torch.__version__, nccl=nccl, gpu=gpu, gpus=torch.cuda.device_count())
    bench = Bench(arguments, report)
    try:
        bench.seats()
        report("workers up")
        parts = {
            bench.contracts: 40, bench.mixed: 25, bench.trips: 30, bench.death: 40, bench.weights: 30,
            bench.bare_trips: 25, bench.bare_abort: 15,
        }  # fmt: skip
        for part, seconds in parts.items():
            report.part(part, min(seconds, ends_at - time.monotonic()))
    finally:
        for process in [*bench.processes, bench.bare]:
            process.kill()
    report("done", failed=report.failed or "nothing")
    return 1 if report.failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", default="measure", choices=["measure", "worker", "bare"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lane", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0, 1], help="the attention worker's, the experts'")
    parser.add_argument("--limit", type=int, default=110, help="seconds after which all ends")
    parser.add_argument("--quick", action="store_true", help="few and small")
    parser.add_argument("--port", type=int, default=29517, help="of the bare groups' store")
    parser.add_argument("--seat", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1, help="MiB of a layer that is sent to a joiner")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    if arguments.role == "worker":
        kit.serve_worker(arguments.lane, arguments.gpus[0], arguments.seat, arguments.layers, arguments.mib)
    elif arguments.role == "bare":
        kit.bare_worker(arguments.lane, arguments.gpus[0], arguments.port)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        code = measure(arguments)
        sys.stdout.flush()
        import os

        os._exit(code)  # what NCCL still holds of dead peers must not keep the process


if __name__ == "__main__":
    main()
