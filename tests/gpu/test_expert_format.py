"""Experts that are held quantised on a GPU: the codes of a CPU, so that digests and replicas agree, and its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tolerances import assert_close
from testkit.pocket.answers import POCKET

from moe_kernels import QuantisedWeight, quantised_linear
from services.config import ExpertFormat
from services.model.experts import ExpertShard, ExpertWeights
from services.model.load_spec import load_spec
from services.model.weights import load_dense, load_experts
from services.model.weights_sample import with_weights

pytestmark = pytest.mark.gpu1
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("expert_format", ["int8", "int4", "int4-channel", "auto"])
def test_a_gpu_holds_and_computes_what_a_cpu_does(tmp_path: Path, expert_format: ExpertFormat) -> None:
    """ "auto" is of MXFP4, held as it is stored."""
    folder = POCKET / "model"
    if expert_format == "auto":
        folder = quantise(folder, tmp_path, FORMATS["mxfp4"]).folder
    spec = with_weights(load_spec(folder), folder, expert_format)
    held: dict[torch.device, ExpertWeights] = {
        device: load_experts(folder, spec, dtype=torch.float32, device=device)[1] for device in (GPU, CPU)
    }
    for name, part in held[CPU].tensors().items():
        assert torch.equal(held[GPU].tensors()[name].cpu(), part), name
    shards = {device: ExpertShard({1: held[device]}, num_experts=spec.num_experts) for device in held}
    for rows in (1, 7, 500):
        x_TD = torch.randn(rows, spec.hidden_size)
        ids_TK = torch.rand(rows, spec.num_experts).topk(spec.top_k, dim=1).indices
        weights_TK = torch.rand(rows, spec.top_k)
        with torch.inference_mode():
            found = shards[GPU].forward(1, x_TD.to(GPU), ids_TK.to(GPU), weights_TK.to(GPU))
            assert_close(found.cpu(), shards[CPU].forward(1, x_TD, ids_TK, weights_TK), 64)


@pytest.mark.parametrize("form", ["ct-int4-channel-asym", "ct-int8-channel", "ct-fp8-channel", "ct-mxfp4"])
def test_other_linear_layers_are_held_and_multiplied_as_on_a_cpu(tmp_path: Path, form: str) -> None:
    """By codes in registers, with columns divided among programs, and by numbers of the whole matrix."""
    folder = quantise(POCKET / "model", tmp_path, FORMATS[form]).folder
    spec = with_weights(load_spec(folder), folder, "dense", "stored")
    held = {device: load_dense(folder, spec, dtype=torch.float32, device=device).layers[1] for device in (GPU, CPU)}
    on_gpu, on_cpu = held[GPU].qkv_OD, held[CPU].qkv_OD
    assert isinstance(on_gpu, QuantisedWeight)
    assert isinstance(on_cpu, QuantisedWeight)
    for name, part in on_cpu.tensors().items():
        assert torch.equal(on_gpu.tensors()[name].cpu(), part), name
    for rows in (1, 7, 100, 500):
        x_TD = torch.randn(rows, spec.hidden_size)
        with torch.inference_mode():
            found = quantised_linear(x_TD.to(GPU), on_gpu)
            assert_close(found.cpu(), quantised_linear(x_TD, on_cpu), 64)
