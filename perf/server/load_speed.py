"""How fast weights are loaded, beside how fast the same files can be read.

    PYTHONPATH=.:kernels:tests python3 -m perf.server.load_speed [--dir DIR] [--layers 5] [--rounds 3] [--device cpu]
        [--dtype bfloat16] [--keep] [--json FILE]

Writes a checkpoint of OLMoE's shapes with random values into DIR, in files of about 1 GB, and reads it in turns:

    files     all bytes by the loader's threads into one buffer that exists already
    new       the same into memory that is made for it, which every loader into the host's memory has to do
    weights   load_dense and load_experts

each warm (all of it in the page cache) and cold (the pages of the files dropped before), and prints the median, and the
share that ``weights`` reach of the others. Needs room for three times the checkpoint's bytes beside its page cache; on
a GPU ``weights`` go there. The exit code is 1 where the share of ``new``, on a GPU of ``files``, is below 60 %.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from perf.server.offline import olmoe  # noqa: E402
from services.model.host_memory import empty  # noqa: E402
from services.model.names import Shape, dense_shapes, expert_shapes  # noqa: E402
from services.model.spec import ModelSpec  # noqa: E402
from services.model.tensor_reads import PIECE_BYTES, reading_threads  # noqa: E402
from services.model.weights import load_dense, load_experts  # noqa: E402

FILE_BYTES = 1 << 30
LEAST_SHARE = 0.6
NOISE_BYTES = 64 << 20


def write_checkpoint(folder: Path, spec: ModelSpec) -> None:
    """Files of about FILE_BYTES with the tensors of ``spec`` in bfloat16."""
    folder.mkdir(parents=True)
    noise = memoryview(torch.randn(NOISE_BYTES // 2).bfloat16().view(torch.uint8).numpy())
    shards: list[dict[str, Shape]] = [{}]
    for name, shape in (dense_shapes(spec) | expert_shapes(spec)).items():
        if sum(map(_nbytes, shards[-1].values())) >= FILE_BYTES:
            shards.append({})
        shards[-1][name] = shape
    for number, shapes in enumerate(shards):
        _write_file(folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors", shapes, noise)


def _write_file(path: Path, shapes: dict[str, Shape], noise: memoryview) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + _nbytes(shape)]}
        end += _nbytes(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(noise)):
            file.write(noise[: min(len(noise), end - begin)])
        file.flush()
        os.fsync(file.fileno())


def _nbytes(shape: Shape) -> int:
    return 2 * math.prod(shape)


class Bench:
    """Reads one checkpoint, in both ways."""

    def __init__(self, folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._folder, self._spec, self._device, self._dtype = folder, spec, device, dtype
        self._files = sorted(folder.glob("*.safetensors"))
        self.nbytes = sum(file.stat().st_size for file in self._files)
        self._buffer = torch.zeros(self.nbytes, dtype=torch.uint8)

    def forget(self) -> None:
        """Drop the pages of the files, and show that they are dropped."""
        for file in self._files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def make_memory(self) -> None:
        """Have the system hold as many free pages as a round takes. A virtual machine gets each page from its host when
        it is first written to, which takes longer than reading it, and gives it back some time after it is freed."""
        _new(2 * self.nbytes)[:: mmap.PAGESIZE].fill_(1)  # for the weights, and for the page cache when it is cold

    def files(self) -> float:
        """Seconds of reading all bytes into the buffer."""
        return self._into(lambda: self._buffer)

    def new(self) -> float:
        """Seconds of reading all bytes into new memory."""
        return self._into(lambda: _new(self.nbytes))

    def _into(self, make: Callable[[], Tensor]) -> float:
        began = time.perf_counter()
        target = memoryview(make().numpy())
        opened = {file: os.open(file, os.O_RDONLY) for file in self._files}
        with ThreadPoolExecutor(reading_threads()) as pool:
            for _ in pool.map(lambda piece: _read(opened[piece[0]], target, *piece[1:]), list(self._pieces())):
                pass
        seconds = time.perf_counter() - began
        for descriptor in opened.values():
            os.close(descriptor)
        return seconds

    def weights(self) -> float:
        """Seconds of loading all weights."""
        began = time.perf_counter()
        dense = load_dense(self._folder, self._spec, dtype=self._dtype, device=self._device)
        experts = load_experts(self._folder, self._spec, dtype=self._dtype, device=self._device)
        seconds = time.perf_counter() - began
        del dense, experts
        return seconds

    def _pieces(self) -> Iterator[tuple[Path, int, int, int]]:
        """File, place in it, place in the buffer, bytes."""
        at = 0
        for file in self._files:
            size = file.stat().st_size
            for begin in range(0, size, PIECE_BYTES):
                yield file, begin, at + begin, min(PIECE_BYTES, size - begin)
            at += size


def _new(nbytes: int) -> Tensor:
    return empty((nbytes,), torch.uint8, torch.device("cpu"))


def _read(descriptor: int, target: memoryview, begin: int, at: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        done += os.preadv(descriptor, [target[at + done : at + nbytes]], begin + done)


def compare(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of all ways, warm and cold."""
    found: dict[str, dict[str, float]] = {}
    ways: dict[str, Callable[[], float]] = {"files": bench.files, "new": bench.new, "weights": bench.weights}
    for state in ("warm", "cold"):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        bench.files()  # into the page cache
        for _ in range(rounds):
            for way, measure in ways.items():
                if state == "cold":
                    bench.forget()
                bench.make_memory()
                seconds[way].append(measure())
        speeds = {way: bench.nbytes / statistics.median(taken) / 1e9 for way, taken in seconds.items()}
        found[state] = speeds
        shown = ", ".join(
            f"{way} {speed:.2f} GB/s ({min(seconds[way]):.2f} to {max(seconds[way]):.2f} s)"
            for way, speed in speeds.items()
        )
        shares = ", ".join(f"{speeds['weights'] / speeds[way]:.0%} of {way}" for way in ("files", "new"))
        print(f"{state}: {shown}: {shares}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/load-speed"))
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for another run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    full = olmoe()
    spec = replace(full, layers=full.layers[: options.layers])
    if not options.dir.exists():
        write_checkpoint(options.dir, spec)
    try:
        bench = Bench(options.dir, spec, torch.device(options.device), getattr(torch, options.dtype))
        print(f"{bench.nbytes / 1e9:.2f} GB, {reading_threads()} threads", flush=True)
        found = compare(bench, options.rounds)
    finally:
        if not options.keep:
            shutil.rmtree(options.dir)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    floor = "new" if options.device == "cpu" else "files"
    return int(any(speeds["weights"] < LEAST_SHARE * speeds[floor] for speeds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
