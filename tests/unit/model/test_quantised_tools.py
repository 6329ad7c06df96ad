"""Checkpoints that tools wrote: the weights are those that the same tools dequantise, bit for bit in their type.

In ``written/``: ``layers`` has one layer of each format with the value that the tool gives it (GPTQModel 7.7.0 for GPTQ
and AWQ, llm-compressor 0.14.0.1 with compressed-tensors 0.20.0 for the rest), ``mixtral-w4a16-asym`` a whole checkpoint
of llm-compressor with SHA-256 of compressed-tensors' values. transformers' own FP8 and MXFP4 are asked here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import MIXTRAL, OLMOE, QWEN2, QWEN3, save_model
from torch import Tensor

from services.model.checkpoint import Checkpoint
from services.model.configfile import ConfigFile
from services.model.dequantised.parts import Part
from services.model.dequantised.values import dequantised
from services.model.load_spec import load_spec
from services.model.names import linear_shapes
from services.model.quantised.config import read_quantisation
from services.model.quantised.quantisation import Choice
from services.model.reference import ReferenceModel
from services.model.sources import Source

WRITTEN = Path(__file__).parent / "written"
LAYERS = json.loads((WRITTEN / "layers.json").read_text())
TOKENS = [3, 90, 17, 44, 5, 61, 8, 8, 29, 70, 11]
FAMILIES = {
    "qwen3": QWEN3 | {"moe_intermediate_size": 32},
    "qwen2": QWEN2 | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
}


@pytest.fixture(scope="module")
def layers() -> dict[str, Tensor]:
    return load_file(WRITTEN / "layers.safetensors")


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_a_tool_packed(layers: dict[str, Tensor], layer: str) -> None:
    found = read_quantisation(ConfigFile(WRITTEN, {"quantization_config": LAYERS[layer]}), experts=1)
    assert found is not None
    said, form = Choice(found).of((layer,), free=False)
    value_NK = layers[f"{layer}.value"]
    (layout, *_) = form.layouts(layer, tuple(value_NK.shape))
    stored = {part: tensor for part, tensor in layout.items() if tensor.name in layers}
    assert said == "quantised"
    assert len(stored) + 1 == sum(name.startswith(f"{layer}.") for name in layers), "every tensor has a use"
    parts = {name: Part(tensor=layers[one.name], name=one.name, file=WRITTEN) for name, one in stored.items()}
    assert all(tuple(parts[name].tensor.shape) in one.shapes for name, one in stored.items())
    assert torch.equal(dequantised(form, parts, tuple(value_NK.shape)).to(value_NK.dtype), value_NK)


def test_a_checkpoint_that_llm_compressor_wrote() -> None:
    """Its experts have other names on disk than Mixtral's own."""
    folder = WRITTEN / "mixtral-w4a16-asym"
    spec, sums = load_spec(folder), json.loads((folder / "sha256.json").read_text())
    with Checkpoint(folder, spec) as checkpoint:
        for weight in linear_shapes(spec):
            if checkpoint.quantised(weight):
                source: Source = checkpoint._sources[weight]
                values = checkpoint.read(weight).bfloat16().view(torch.uint8).numpy().data
                assert hashlib.sha256(values).hexdigest().startswith(sums.pop(source.module)), weight
    assert not sums
    assert ReferenceModel.load(folder).logits([3, 9, 17, 44]).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["fp8-block", "fp8-block-bf16-scales"])
def test_oracle_equals_transformers_which_loads_fp8_blocks(family: str, form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path / "plain", FAMILIES[family])
    made = quantise(tmp_path / "plain", tmp_path, FORMATS[form])
    model: Any = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    model.eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        expected_TV = model(torch.tensor([TOKENS])).logits[0]
    logits_TV = ReferenceModel.load(made.folder).logits(TOKENS)
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-5, rtol=1e-5)
    assert (logits_TV - ReferenceModel.load(tmp_path / "plain").logits(TOKENS)).abs().max() > 0.01


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    """Every byte and every scale but 255, which is no number there."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(3, 251, dtype=torch.uint8).reshape(1, 8, 31)
    blocks = torch.arange(8 * 31 * 16).remainder(256).to(torch.uint8).reshape(1, 8, 31, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    config = ConfigFile(WRITTEN, {"quantization_config": {"quant_method": "mxfp4"}})
    found = read_quantisation(config, experts=1)
    assert found is not None
    tensors = {"codes": blocks[0], "scales": scales[0]}
    parts = {name: Part(tensor=tensor, name=name, file=WRITTEN) for name, tensor in tensors.items()}
    assert torch.equal(dequantised(found.groups[0].format, parts, (8, 31 * 32)), expected)
