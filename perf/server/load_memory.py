"""How much memory of the host loading a quantised checkpoint needs beyond its weights, as where they go to a GPU.

    PYTHONPATH=.:kernels:tests python3 -m perf.server.load_memory [--dir DIR] [--format fp8] [--layers 6]
        [--held] [--holes] [--device meta] [--keep] [--json FILE]

Writes a checkpoint of Mixtral-8x7B's shapes, whose matrices are the largest of all families, into DIR, in files of
about 1 GB; codes are noise and scales one number. With --holes all but scales is zeros that take no disk, so that
30 GB fit anywhere. With --held experts are held as they are stored, otherwise in 16 bits. A process of its own
loads all of it onto a device whose memory is not the host's, and says by how much its resident memory grew at most,
as the kernel counts it. On the device ``meta`` tensors have no memory at all, and what is copied to them is
dropped: the way there is that of a GPU, but for pinning its buffers (at most 16 MiB for each thread that reads) and
the driver's own memory. The exit code is 1 where it is more than the largest file and 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from perf.kit.stand_ins import fill_in

fill_in()  # before the project's imports

import torch  # noqa: E402

from services.model.load_spec import load_spec  # noqa: E402
from services.model.names import Shape, dense_shapes, linear_shapes  # noqa: E402
from services.model.quantised.quantisation import Choice  # noqa: E402
from services.model.spec import ModelSpec  # noqa: E402
from services.model.stored_tensors import DTYPES  # noqa: E402
from services.model.weights import load_dense, load_experts  # noqa: E402
from services.model.weights_sample import with_weights  # noqa: E402

FILE_BYTES = 1 << 30
NOISE_BYTES = 64 << 20
NO_NAN = 0x77
"""Bits of a byte of noise that are kept: no FP8 value of them is NaN."""
ALLOWED_BYTES = 2 << 30
FORMATS: dict[str, dict[str, object]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """Bytes of one loading. ``grown`` is the most by which resident memory exceeded what it was before."""

    files: int
    largest_file: int
    weights: int
    grown: int
    left: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: Shape
    kind: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """Yield what a checkpoint of ``spec`` consists of."""
    assert spec.quantisation is not None
    choice, linear = Choice(spec.quantisation), linear_shapes(spec)
    for name, shape in (dense_shapes(spec) | linear).items():
        module = name.removesuffix(".weight")
        free = name == "lm_head.weight" or name.endswith(".gate.weight")
        if name not in linear or free:
            yield Tensor(name=name, dtype="BF16", shape=shape, kind="plain")
            continue
        _, form = choice.of((module,), free=False)
        for part, stored in form.layouts(module, shape)[0].items():
            if not stored.optional:
                yield Tensor(name=stored.name, dtype=stored.types[0], shape=stored.shapes[0], kind=part)


def write_checkpoint(folder: Path, form: str, layers: int, *, holes: bool) -> None:
    """Write files of about FILE_BYTES."""
    folder.mkdir(parents=True)
    config = MIXTRAL | {"num_hidden_layers": layers, "quantization_config": FORMATS[form]}
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors(load_spec(folder)):
        if sum(each.nbytes for each in shards[-1]) >= FILE_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    noise = torch.randint(0, 256, (NOISE_BYTES,), dtype=torch.uint8) & NO_NAN
    for number, shard in enumerate(shards):
        _write_file(folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors", shard, noise, holes=holes)


def _write_file(path: Path, shard: list[Tensor], noise: torch.Tensor, *, holes: bool) -> None:
    header, end = {}, 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]
        }  # fmt: skip
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            if holes and tensor.kind != "scales":
                file.seek(tensor.nbytes, os.SEEK_CUR)
                file.truncate()
                continue
            content = noise
            if tensor.kind in ("scales", "plain"):
                content = torch.full((1 << 20,), 2.0**-8, dtype=DTYPES[tensor.dtype]).view(torch.uint8)
            for begin in range(0, tensor.nbytes, len(content)):
                file.write(content[: min(len(content), tensor.nbytes - begin)].numpy().data)


def load(folder: Path, device: torch.device, *, held: bool) -> Grown:
    """Load the checkpoint in this process, and return what it took."""
    spec = with_weights(load_spec(folder), folder, "auto" if held else "dense")
    assert bool(spec.experts.label) == held, "experts are held as they were asked for"
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    before, began = _resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
    dense = load_dense(folder, spec, dtype=torch.bfloat16, device=device)
    experts = load_experts(folder, spec, dtype=torch.bfloat16, device=device)
    weights = sum(layer.nbytes for layer in experts.values()) + dense.embed_VD.nbytes + dense.lm_head_VD.nbytes
    return Grown(
        files=sum(sizes),
        largest_file=max(sizes),
        weights=weights,
        grown=_resident("VmHWM") - before,
        left=_resident("VmRSS") - before,
        seconds=time.perf_counter() - began,
    )


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/load-memory"))
    parser.add_argument("--format", choices=FORMATS, default="fp8")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--held", action="store_true", help="experts as they are stored")
    parser.add_argument("--holes", action="store_true", help="zeros that take no disk, but for scales")
    parser.add_argument("--device", default="meta")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for another run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(asdict(load(options.dir, torch.device(options.device), held=options.held))))
        return 0
    if not options.dir.exists():
        write_checkpoint(options.dir, options.format, options.layers, holes=options.holes)
    try:
        words = [sys.executable, "-m", "perf.server.load_memory", "--load", "--dir", str(options.dir)]
        words += ["--held"] if options.held else []
        ended = subprocess.run([*words, "--device", options.device], stdout=subprocess.PIPE, text=True, check=True)
        found = Grown(**json.loads(ended.stdout))
    finally:
        if not options.keep:
            shutil.rmtree(options.dir)
    mib = {name: f"{value / 2**20:,.0f} MiB" for name, value in asdict(found).items() if name != "seconds"}
    print(f"{options.format}: " + ", ".join(f"{name} {value}" for name, value in mib.items()), f"{found.seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=1))
    return int(found.grown > found.largest_file + ALLOWED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
