"""gpt-oss's checkpoints as they are published: experts in MXFP4, and a tokenizer with the marks of its answers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from testkit.models.quantised_checkpoints import WEIGHTS, configure
from testkit.models.quantisers import FORMATS, Encoded

LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""What the published ones leave as it is, in their words."""
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant<|channel|>{{ channel }}<|message|>"
)
"""With the answer's channel as an option, as small models write no marks of their own accord."""


def in_mxfp4(folder: Path, exact: Path) -> None:
    """Quantise the experts of ``folder``; ``exact`` gets what that stands for, as numbers."""
    stored = load_file(folder / WEIGHTS)
    numbers = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        made = [_encoded(weight_IO) for weight_IO in stored.pop(name)]
        numbers[name] = torch.stack([each.value_NK.t() for each in made])
        stored |= {f"{name}{end}": torch.stack([each.tensors[end] for each in made]) for end in ("_blocks", "_scales")}
    exact.mkdir()
    (exact / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, exact / WEIGHTS)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    configure(folder, {"quant_method": "mxfp4", "modules_to_not_convert": LEFT})


def _encoded(weight_IO: Tensor) -> Encoded:
    found = FORMATS["mxfp4"].encode(weight_IO.t().contiguous())
    assert found is not None, "columns do not divide"
    return found


def add_marks(folder: Path) -> None:
    """Make the last tokens of the folder's vocabulary the marks, and the template one that has them."""
    path = folder / "tokenizer.json"
    text = path.read_text()
    unused = [f"<x{number}>" for number in range(len(MARKS))]
    for mark, filler in zip(MARKS, unused, strict=True):
        assert text.count(f'"{filler}"') == 1
        text = text.replace(f'"{filler}"', f'"{mark}"')
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(path))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
