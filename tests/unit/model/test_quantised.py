"""Checkpoints of every format and family: the weights that are loaded are what the files stand for, bit for bit.

The checkpoints are encoded by hand from the formats' definitions; those of real tools are in test_quantised_tools.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.quantised_checkpoints import Quantised, quantise, together
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import GLM4, MINIMAX, MIXTRAL, OLMOE, QWEN2, QWEN3, ServingPath, save_model

from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.names import dense_shapes, expert_shapes
from services.model.reference import ReferenceModel

FAMILIES: dict[str, dict[str, Any]] = {
    # 48 and 40 columns leave remainders of groups and blocks; layers without experts, biases, tied embeddings
    "qwen3": QWEN3 | {"moe_intermediate_size": 48, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "qwen2": QWEN2 | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "num_experts": 3},
    "mixtral": MIXTRAL | {"intermediate_size": 40, "num_local_experts": 2, "num_experts_per_tok": 1},
    "olmoe": OLMOE | {"intermediate_size": 56, "attention_bias": True},
    "glm4": GLM4 | {"moe_intermediate_size": 40, "n_routed_experts": 3, "num_experts_per_tok": 2},
    "minimax": MINIMAX | {"intermediate_size": 40, "num_local_experts": 2, "num_experts_per_tok": 1},
}
TOKENS = [3, 90, 17, 44, 5, 61, 8, 8, 29, 70, 11]


@pytest.fixture(scope="session", params=FAMILIES)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(folder, FAMILIES[request.param])
    return folder


@pytest.fixture(params=FORMATS)
def made(request: pytest.FixtureRequest, plain: Path, tmp_path: Path) -> Quantised:
    return quantise(plain, tmp_path, FORMATS[request.param])


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    spec = load_spec(folder)
    with Checkpoint(folder, spec) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in dense_shapes(spec) | expert_shapes(spec)}


def assert_same(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    assert found.keys() == exact.keys()
    assert [name for name in exact if not torch.equal(found[name], exact[name])] == []


def served(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    path = ServingPath(folder, dtype=dtype)
    run = path.start(TOKENS)
    path.step([(run, len(TOKENS))])
    return torch.cat(run.logits)


def test_every_weight_is_what_the_files_stand_for(made: Quantised) -> None:
    assert any(".experts." in name for name in made.quantised)
    assert_same(read_all(made.folder), read_all(made.reference))


def test_oracle_and_server_compute_with_them(made: Quantised) -> None:
    expected_TV = ReferenceModel.load(made.reference).logits(TOKENS)
    assert torch.equal(ReferenceModel.load(made.folder).logits(TOKENS), expected_TV)
    torch.testing.assert_close(served(made.folder), expected_TV, atol=1e-5, rtol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(served(made.folder, dtype), served(made.reference, dtype))


@pytest.mark.parametrize("family", [QWEN3, QWEN2, OLMOE])
def test_experts_of_a_layer_in_one_tensor(family: dict[str, Any], tmp_path: Path) -> None:
    """As gpt-oss has them, with the rows of gate and up projection in turn."""
    width = "intermediate_size" if family is OLMOE else "moe_intermediate_size"
    save_model(tmp_path / "plain", family | {width: 64})
    made = quantise(tmp_path / "plain", tmp_path, FORMATS["mxfp4"])
    assert len(made.quantised) == 3 * 3 * family["num_experts"]
    together(made.folder, family["num_experts"])
    assert_same(read_all(made.folder), read_all(made.reference))
