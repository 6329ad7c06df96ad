"""Quantises checkpoints: the folder as a tool would write it, and a reference with the weights that it stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testkit.models.quantisers import Format

ROUTERS = (".gate.weight", ".router.weight", ".shared_expert_gate.weight")
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """``quantised``: names of the weights that were encoded."""

    folder: Path
    reference: Path
    quantised: frozenset[str]


def is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and "embed_tokens" not in name and not name.endswith((*ROUTERS, "_bias"))


def quantise(plain: Path, to: Path, form: Format) -> Quantised:
    """Encode the linear layers of ``plain``, a folder with one file of float32 weights: all but routers and, unless
    ``form.head`` says otherwise, the output head."""
    tensors = load_file(plain / WEIGHTS)
    stored, exact = dict(tensors), dict(tensors)
    done = set()
    for name, weight in tensors.items():
        if not is_linear(name, weight) or (name == "lm_head.weight" and not form.head):
            continue
        if (form.experts_only and ".experts." not in name) or name.removesuffix(".weight") in form.left:
            continue
        encoded = form.encode(weight)
        if encoded is None:
            continue
        del stored[name]
        module = name.removesuffix(".weight")
        stored |= {f"{module}{end}": tensor.contiguous() for end, tensor in encoded.tensors.items()}
        exact[name] = encoded.value_NK
        done.add(name)
    assert done, "nothing was quantised"
    folder, reference = (
        _copied(plain, to / name, values) for name, values in (("quantised", stored), ("reference", exact))
    )
    configure(folder, dict(form.config))
    return Quantised(folder=folder, reference=reference, quantised=frozenset(done))


def _copied(plain: Path, to: Path, tensors: dict[str, Tensor]) -> Path:
    shutil.copytree(plain, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, to / WEIGHTS, metadata={"format": "pt"})
    return to


def configure(folder: Path, quantisation: dict[str, object] | None) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config if quantisation is None else config | {"quantization_config": quantisation}))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def together(folder: Path, experts: int) -> None:
    """Lay the MXFP4 experts of each layer out as gpt-oss has them: one tensor, rows of gate and up in turn."""

    def edit(tensors: dict[str, Tensor]) -> None:
        prefixes = {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}
        for prefix in prefixes:
            for end in ("_blocks", "_scales"):
                parts = {
                    part: torch.stack([tensors.pop(f"{prefix}.{i}.{part}_proj{end}") for i in range(experts)])
                    for part in ("gate", "up", "down")
                }
                both = torch.stack((parts["gate"], parts["up"]), dim=2).flatten(1, 2)
                tensors |= {f"{prefix}.gate_up_proj{end}": both, f"{prefix}.down_proj{end}": parts["down"].clone()}

    change(folder, edit)
