"""What `serve` refuses before anything starts, and what it says that it will use."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testkit.models.checkpoints import save_checkpoint

from services.attention.setup.batch_size import batch_size
from services.config import Settings
from services.errors import CheckpointError, ConfigError, WorkerExtraMissing
from services.supervisor import gpus as finding
from services.supervisor.gpus import Gpus, find_gpus
from services.supervisor.preflight import EXPERT_WORKER_SPARE, Preview, preflight
from services.supervisor.tree import _missing

TWO = Gpus(names=("NVIDIA H200", "NVIDIA H200"))
SEQS = batch_size(seqs=None, tokens=None, gpu_bytes=141 << 30).max_num_seqs
NONE = Gpus(missing="the driver finds no GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_checkpoint(tmp_path_factory.mktemp("model") / "m", "olmoe")
    (made / "tokenizer.json").write_text("{}")
    return made


def _preflight(folder: Path, gpus: Gpus = NONE, **values: Any) -> Preview:
    return preflight(Settings(model=folder, **values), lambda: gpus)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_model_len": 100_000}, "--max-model-len 100000 exceeds the"),
        ({"max_model_len": 17, "kv_blocks": 1}, "--max-model-len 17 does not fit"),
        ({"kv_memory_gib": 1e-6}, "--kv-memory-gib 1e-06 is less than one KV block"),
        ({"device": "cuda"}, "--device cuda cannot be used: the driver finds no GPU. Try --device cpu or auto."),
        ({"device": "cuda:0"}, "--device cuda:0 cannot be used"),
        ({"layout": "disaggregated", "expert_groups": 4096}, "cannot be split into 4096 shard groups"),
        ({"layout": "colocated", "workers": 4096}, "cannot be split into 4096 shard groups"),
        ({"layout": "lockstep", "workers": 5, "expert_slices": 5}, "cannot be split into 5 slices"),
    ],
)
def test_what_the_roles_would_refuse_is_refused_at_once(folder: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _preflight(folder, **values)


def _drafts(model: Path) -> dict[str, Any]:
    return {"speculative_config": json.dumps({"method": "draft_model", "model": str(model)})}


def test_a_draft_model_is_counted_and_checked_before_anything_starts() -> None:
    pocket = Path(__file__).parents[3] / "examples/pocket-moe"
    drafts = _drafts(pocket / "speculators/0")
    alone, both = _preflight(pocket / "model"), _preflight(pocket / "model", **drafts)
    assert both.weight_bytes - alone.weight_bytes == pytest.approx(2_983_680, rel=0.01)
    assert alone.room is not None
    assert both.room is not None
    assert both.room.kv_blocks < alone.room.kv_blocks
    with pytest.raises(ConfigError, match=r"nowhere.*is not a folder"):
        _preflight(pocket / "model", **_drafts(Path("nowhere")))


def test_a_draft_model_with_a_shorter_context_is_refused(tmp_path: Path) -> None:
    pocket, draft = Path(__file__).parents[3] / "examples/pocket-moe", tmp_path / "draft"
    shutil.copytree(pocket / "speculators/0", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    _preflight(pocket / "model", max_model_len=512, **_drafts(draft))
    for values in ({}, {"max_model_len": 600}, {"max_model_len": 600, "device": "cuda"}):
        with pytest.raises(ConfigError, match="--max-model-len 512"):
            _preflight(pocket / "model", TWO, **values, **_drafts(draft))


def test_more_workers_than_gpus_are_refused_unless_they_may_share(folder: Path) -> None:
    with pytest.raises(ConfigError, match="4 workers need as many GPUs, and there are 2"):
        _preflight(folder, TWO, layout="disaggregated", expert_workers=3, device="cuda")
    for values in ({"device": "auto"}, {"device": "cpu"}, {"expert_workers": 1, "device": "cuda"}):
        _preflight(folder, TWO, **({"layout": "disaggregated", "expert_workers": 3} | values))


def test_a_checkpoint_without_weights_or_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        _preflight(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file"):
        _preflight(tmp_path)


def test_gpus_are_named_and_counted(folder: Path) -> None:
    assert _preflight(folder, TWO).device == "cuda (2 x NVIDIA H200)"
    assert _preflight(folder, TWO, device="cuda:1").device == "cuda:1 (NVIDIA H200)"
    assert _preflight(folder, TWO, device="cpu").device == _preflight(folder).device == "cpu"
    assert _preflight(folder, Gpus(), device="cuda").device == "cuda", "torch alone knows"
    with pytest.raises(ConfigError, match="GPUs here are cuda:0 to cuda:1"):
        _preflight(folder, TWO, device="cuda:2")


def test_sizes_are_those_of_the_model(folder: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    found = _preflight(folder, kv_blocks=10, max_model_len=32, max_num_seqs=3)
    assert found.parameters == sum(tensor.numel() for tensor in weights.values())
    assert found.expert_parameters == sum(tensor.numel() for name, tensor in weights.items() if ".experts." in name)
    assert (found.room.kv_tokens, found.dtype) == (160, "float32")
    text = "\n".join(found.lines())
    assert "device cpu, float32" in text
    assert "160 tokens; up to 3 requests per batch" in text
    assert "longest context: 32 tokens (prompt and answer); the KV cache holds 5 of these" in text


def test_experts_are_counted_as_they_are_held(folder: Path) -> None:
    """Two groups of them, on a worker each; what they cannot be held in is refused before anything starts."""
    options: dict[str, Any] = {"layout": "disaggregated", "expert_workers": 2}
    dense, held = (_preflight(folder, TWO, **options, **more) for more in ({}, {"expert_format": "int8"}))
    assert "in experts, held in int8-channel (" in "\n".join(held.lines())
    experts = dense.expert_parameters
    scales = held.weight_bytes - (dense.weight_bytes - 4 * experts) - experts
    assert 0 < scales < experts / 8
    assert held.expert_worker_bytes == EXPERT_WORKER_SPARE + (experts + scales) // 2
    with pytest.raises(ConfigError, match=r'"model\.layers\.0\..*gate_proj\.weight" cannot be held in fp8'):
        _preflight(folder, expert_format="fp8")


def test_what_a_cpu_keeps_beside_quantised_experts_is_said(folder: Path) -> None:
    """Numbers in float32 here, as large as dense experts; a GPU keeps nothing, nor does a CPU of dense ones."""
    dense, held = (_preflight(folder, **more) for more in ({}, {"expert_format": "int8"}))
    assert held.kept_bytes == 4 * held.expert_parameters
    first, second, *_ = held.lines()
    kept = f"{held.kept_bytes / 2**20:.3g} MiB"
    assert f"of weights, up to {kept} more once all experts were used)" in first
    assert second == (
        "experts held in int8-channel: on a CPU what their products take is made as they are used, and kept, which "
        f"takes up to {kept} more, if that leaves a twentieth of the machine's memory"
    )
    assert (dense.kept_bytes, len(dense.lines())) == (0, len(held.lines()) - 1)
    assert _preflight(folder, TWO, expert_format="int8").kept_bytes == 0


def test_linear_layers_are_counted_as_they_are_held(tmp_path: Path) -> None:
    from testkit.models.checkpoints import save_checkpoint
    from testkit.models.quantised_checkpoints import quantise
    from testkit.models.quantisers import FORMATS

    plain = save_checkpoint(tmp_path / "plain", "qwen2_moe", num_key_value_heads=4)
    folder = quantise(plain, tmp_path, FORMATS["ct-int8-channel"]).folder
    formats = ({}, {"dense_format": "stored"}, {"dense_format": "stored", "expert_format": "dense"})
    dense, held, alone = (_preflight(folder, **more) for more in formats)
    lines = held.lines()
    assert "in experts, held in int8-channel, other linear layers in int8-channel (" in lines[0]
    assert lines[1].startswith("experts held in int8-channel and linear layers held in int8-channel: on a CPU")
    assert alone.lines()[1].startswith("linear layers held in int8-channel: on a CPU")
    assert "more once all of them were used)" in alone.lines()[0]
    numbers = alone.kept_bytes // 4
    scales = held.weight_bytes - dense.weight_bytes + 3 * numbers
    assert 0 < scales < numbers / 8
    assert held.kept_bytes == dense.kept_bytes + alone.kept_bytes


def test_it_agrees_with_the_engine_on_the_kv_cache(folder: Path) -> None:
    import torch

    from services.attention.kv_cache import block_bytes, blocks_within
    from services.model.load_spec import load_spec

    spec, found = load_spec(folder), _preflight(folder, kv_memory_gib=0.25, dtype="bfloat16")
    assert found.room.kv_blocks == blocks_within(0.25, spec, block_size=16, dtype=torch.bfloat16)
    assert found.kv_bytes == found.room.kv_blocks * block_bytes(spec, block_size=16, dtype=torch.bfloat16)


def test_on_a_gpu_the_worker_decides_on_the_kv_cache_unless_it_is_given(folder: Path) -> None:
    known = Gpus(names=TWO.names, memory=(141 << 30, 141 << 30))
    found, blind = _preflight(folder, known), _preflight(folder, TWO)
    assert found.room is None
    assert found.kv_bytes is None
    said = "KV cache per attention worker: what weights and steps leave of --gpu-memory-utilization 0.9"
    assert found.lines()[1:] == [f"{said}; up to {SEQS} requests per batch (--max-num-seqs)"]
    assert blind.lines()[1:] == [said]
    given = _preflight(folder, known, kv_memory_gib=0.5, max_num_seqs=9)
    assert given.room is not None
    assert "up to 9 requests per batch" in given.lines()[1]
    with pytest.raises(ConfigError, match="--max-model-len 100000 exceeds the"):
        _preflight(folder, known, max_model_len=100_000)
    on_cpu = _preflight(folder, known, device="cpu")
    assert on_cpu.kv_bytes is not None
    assert 2**30 - (1 << 20) < on_cpu.kv_bytes <= 2**30, "1 GiB, as ever"


def test_workers_on_one_gpu_divide_it(folder: Path) -> None:
    """An expert worker's weights are taken off first; what is left goes to those with a KV cache in equal parts."""
    one = Gpus(names=("NVIDIA H200",), memory=(141 << 30,))
    apart = Settings(model=folder, layout="disaggregated", workers=2, expert_workers=2)
    shared = preflight(apart, lambda: one)
    each = shared.expert_worker_bytes
    assert each == EXPERT_WORKER_SPARE + shared.expert_parameters // 2 * 4
    reserved = round(2 * each / 2**30, 3)
    assert shared.shares(apart) == [{"gpu_workers": 2, "gpu_reserved_gib": reserved}] * 2 + [{}, {}]
    alone = preflight(apart, lambda: Gpus(names=TWO.names * 2))
    assert alone.shares(apart) == [{}] * 4
    colocated = Settings(model=folder, layout="colocated", workers=3)
    assert preflight(colocated, lambda: TWO).shares(colocated) == [
        {"gpu_workers": 2, "gpu_reserved_gib": 0.0}, {}, {"gpu_workers": 2, "gpu_reserved_gib": 0.0},
    ]  # fmt: skip
    for device, shares in (("cpu", [{}, {}]), ("cuda:1", [{"gpu_workers": 2, "gpu_reserved_gib": 0.0}] * 2)):
        settings = Settings(model=folder, workers=2, device=device)
        assert preflight(settings, lambda: TWO).shares(settings) == shares


def test_gpus_are_found_as_torch_finds_them() -> None:
    import torch

    assert len(find_gpus().names) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_without_torch_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(WorkerExtraMissing, match=r"package torch is not installed.*'expertmesh\[worker\]'"):
        preflight(Settings(model=folder))


def test_serve_refuses_within_a_second_of_its_imports_and_starts_nothing(folder: Path) -> None:
    options = ["--max-model-len", "100000", "--log-format", "text"]
    command = [sys.executable, "-m", "services", "serve", str(folder), "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == ConfigError.exit_code
    assert "--max-model-len 100000 exceeds" in done.stderr
    assert "Redis" not in done.stdout + done.stderr


def test_what_is_waited_for_is_named_without_json() -> None:
    answer = '{"error":{"message":"Not ready; missing: redis, worker.","type":"x"}}'
    assert _missing(answer) == "redis, worker"
    assert _missing("no JSON\n") == "no JSON"
