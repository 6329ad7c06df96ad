"""Loading: damaged, foreign or incomplete checkpoints are refused by name, and each role reads only its part."""

from __future__ import annotations

import json
import logging
import math
import os
import pty
import shutil
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from testkit.models.tiny_models import QWEN2, QWEN3, save_model
from torch import Tensor

from services.errors import CheckpointError, UnsupportedModel
from services.model.checkpoint import Checkpoint
from services.model.header import read_header
from services.model.load_spec import load_spec
from services.model.names import dense_shapes, expert_shapes
from services.model.progress import BarProgress, LoadStopped, LogProgress, Stoppable, loading_progress
from services.model.tensor_reads import Place, read_tensors
from services.model.weights import load_dense, load_experts

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def folder(qwen2_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(qwen2_folder, tmp_path / "copy"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    spec = load_spec(folder)
    load_dense(folder, spec, dtype=dtype, device=CPU)
    load_experts(folder, spec, dtype=dtype, device=CPU)


def refused(folder: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        load(folder)
    assert str(folder) in str(error.value)
    return str(error.value)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_missing_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(EXPERT))
    message = refused(folder)
    assert f'lacks 1 tensor ("{EXPERT}")' in message
    assert "Download" in message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.2" in name])
    assert "lacks 38 tensors" in refused(folder)
    assert "and 33 more" in refused(folder)


def test_missing_output_head_hints_at_tying(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "tie_word_embeddings" in refused(folder)


def test_unexpected_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.9.extra.weight": torch.zeros(2)}))
    message = refused(folder)
    assert '"model.layers.9.extra.weight"' in message
    assert WEIGHTS in message


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path, QWEN3 | {"tie_word_embeddings": True})
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(96, 32)}
    change(tmp_path, lambda tensors: tensors.update(extra))
    spec = load_spec(tmp_path)
    weights = load_dense(tmp_path, spec, dtype=torch.float32, device=CPU)
    assert weights.lm_head_VD is weights.embed_VD
    assert weights.lm_head_VD.abs().max() > 0


def test_wrong_shape(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(16, 31)}))
    message = refused(folder)
    assert f'"{EXPERT}" has shape [16, 31], config.json calls for [16, 32]' in message


def test_unsupported_tensor_type(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}))
    assert "I8" in refused(folder, UnsupportedModel)


@pytest.mark.parametrize("keep", [0, 5, 200, -4, -3000])
def test_truncated_file(folder: Path, keep: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    message = refused(folder)
    assert f"{WEIGHTS} is truncated" in message
    assert "Download the file again" in message


JUNK = {
    "text": b"not a tensor file" * 40,
    "fields": (20).to_bytes(8, "little") + b'{"a": {"dtype": 1}} ' * 3,
    "nested": (200_000).to_bytes(8, "little") + b"[" * 200_000,
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_corrupt_file(folder: Path, junk: bytes) -> None:
    (folder / WEIGHTS).write_bytes(junk)
    message = refused(folder)
    assert "damaged" in message
    assert "Download the file again" in message


def sparse(path: Path, start: bytes, size: int) -> None:
    """A file that looks large and takes a block of the disk."""
    path.write_bytes(start)
    with path.open("r+b") as stream:
        stream.truncate(size)


def test_no_more_is_read_of_a_header_than_a_header_can_have(folder: Path) -> None:
    sparse(folder / WEIGHTS, (1 << 30).to_bytes(8, "little"), 1 << 31)
    peak, message = traced(refused, folder)
    assert "more than 100,000,000" in message
    assert peak < 10_000_000


def test_no_more_is_read_of_an_index_than_an_index_can_have(sharded: Path) -> None:
    sparse(sharded / INDEX, b"{", 1 << 30)
    peak, message = traced(refused, sharded)
    assert INDEX in message
    assert peak < 10_000_000


def traced(call: Callable[[Path], str], folder: Path) -> tuple[int, str]:
    """The most bytes that Python held for ``call``, and its result."""
    tracemalloc.start()
    try:
        message = call(folder)
        return tracemalloc.get_traced_memory()[1], message
    finally:
        tracemalloc.stop()


SIZES = {"F64": 8, "F32": 4, "BF16": 2, "I8": 1, "BOOL": 1}
ODD = (-8, -1, 1, 8, 1 << 40, 1 << 70)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header of tensors one behind the other, or one that differs from it in a place; and the bytes that follow."""
    header: dict[str, Any] = {}
    end = 0
    for name in "abc"[: draw(st.integers(1, 3))]:
        dtype, shape = draw(st.sampled_from(list(SIZES))), draw(st.lists(st.integers(0, 4), max_size=3))
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    changed = header[draw(st.sampled_from(list(header)))]
    place, by = draw(st.integers(0, 1)), draw(st.sampled_from(ODD))
    kind = draw(
        st.sampled_from(["right", "right", "offset", "both", "swapped", "shape", "type", "text", "three", "cut"])
    )
    begin, after = changed["data_offsets"]
    changed["data_offsets"] = {
        "offset": [begin + by * (1 - place), after + by * place],
        "both": [begin + by, after + by],
        "swapped": [after, begin],
        "text": [str(begin), str(after)],
        "three": [begin, after, after],
    }.get(kind, [begin, after])
    if kind == "shape":
        changed["shape"] = [*changed["shape"], abs(by)]
    if kind == "type":
        changed["dtype"] = draw(st.sampled_from(list(SIZES)))
    return header, end - (kind == "cut")


@settings(max_examples=300, deadline=None)
@given(made=headers())
def test_headers_are_refused_where_the_library_refuses_them(made: tuple[dict[str, Any], int]) -> None:
    """Here it is at the start, by the file's name; the library would do so when the tensor is read, or another is."""
    header, size = made
    raw = json.dumps(header).encode()
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as out:
        out.write(len(raw).to_bytes(8, "little") + raw + bytes(max(0, size)))
        out.flush()
        try:
            with safe_open(out.name, framework="np") as library:
                names = set(library.keys())
        except SafetensorError:
            with pytest.raises(CheckpointError, match=f"{out.name} is .*damaged"):
                read_header(Path(out.name))
        else:
            assert set(read_header(Path(out.name))) == names


@pytest.mark.parametrize("instead", [Path.mkdir, lambda path: path.symlink_to("nowhere")], ids=["folder", "no target"])
def test_unreadable_file(folder: Path, instead: Callable[[Path], object]) -> None:
    (folder / WEIGHTS).unlink()
    instead(folder / WEIGHTS)
    message = refused(folder)
    assert WEIGHTS in message
    assert "readable by this user" in message


def test_lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refused(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "no *.safetensors file" in refused(folder)


def test_pickled_weights_only(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    message = refused(folder)
    assert '"pytorch_model.bin"' in message
    assert "safetensors version, or convert it" in message


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(tmp_path / "sharded", QWEN2, shard_size="40KB")
    return tmp_path / "sharded"


def test_index_names_a_missing_file(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    message = refused(sharded)
    assert victim.name in message
    assert "Download the missing files" in message


def test_index_names_a_missing_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = sorted(index["weight_map"].values())[0]
    (sharded / INDEX).write_text(json.dumps(index))
    assert "model.ghost.weight" in refused(sharded)


BAD_INDEXES = ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}', "[" * 200_000]


@pytest.mark.parametrize("text", BAD_INDEXES, ids=lambda text: text[:16])
def test_bad_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refused(sharded)


def test_shards_without_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    load(sharded)
    shutil.copy(sorted(sharded.glob("*.safetensors"))[0], sharded / "stray.safetensors")
    assert "Both" in refused(sharded)


def test_float16_overflow_is_refused(folder: Path) -> None:
    change(folder, lambda tensors: tensors[EXPERT].fill_(1e6))
    load(folder)
    with pytest.raises(CheckpointError, match=f"{EXPERT}.*--dtype bfloat16"):
        load(folder, torch.float16)


def test_dense_part_reads_no_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, read = load_spec(folder), []

    def noting(checkpoint: Checkpoint, places: Sequence[Place], *args: Any) -> None:
        read.extend(place.name for place in places)
        read_tensors(checkpoint, places, *args)

    monkeypatch.setattr("services.model.weight_source.read_tensors", noting)
    load_dense(folder, spec, dtype=torch.float32, device=CPU)
    assert sorted(read) == sorted(dense_shapes(spec))
    read.clear()
    load_experts(folder, spec, dtype=torch.float32, device=CPU, experts={1: [6, 2]})
    assert len(read) == 6
    assert all("layers.1.mlp.experts.6" in name or "layers.1.mlp.experts.2" in name for name in read)


def test_experts_are_stacked_in_the_order_asked_for(folder: Path) -> None:
    spec = load_spec(folder)
    tensors = load_file(folder / WEIGHTS)
    held = load_experts(folder, spec, dtype=torch.bfloat16, device=CPU, experts={1: [6, 2]})[1]
    assert held.expert_ids == (6, 2)
    for slot, expert in enumerate(held.expert_ids):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        parts = [tensors[f"{prefix}.{part}_proj.weight"].bfloat16() for part in ("gate", "up", "down")]
        torch.testing.assert_close(held.w_gate_up_E2FD[slot], torch.cat(parts[:2]), atol=0, rtol=0)
        torch.testing.assert_close(held.w_down_EDF[slot], parts[2], atol=0, rtol=0)


class Recorder:
    def __init__(self) -> None:
        self.phases: list[list[int]] = []

    def begin(self, what: str, total_bytes: int) -> None:
        del what
        self.phases.append([total_bytes, 0])

    def advance(self, nbytes: int) -> None:
        self.phases[-1][1] += nbytes


def test_progress_ends_at_the_total(folder: Path) -> None:
    spec, recorder = load_spec(folder), Recorder()
    load_dense(folder, spec, dtype=torch.bfloat16, device=CPU, progress=recorder)
    load_experts(folder, spec, dtype=torch.bfloat16, device=CPU, progress=recorder)
    sizes = [
        sum(4 * torch.Size(shape).numel() for shape in part(spec).values()) for part in (dense_shapes, expert_shapes)
    ]
    assert recorder.phases == [[size, size] for size in sizes]


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal, logger = Terminal(), logging.getLogger("loading")
    with loading_progress(logger, terminal) as bar:
        assert isinstance(bar, BarProgress)
        bar.begin("expert weights", 100)
        bar.advance(100)
    assert "expert weights" in terminal.getvalue()
    with caplog.at_level(logging.INFO), loading_progress(logger, StringIO()) as lines:
        assert isinstance(lines, LogProgress)
        lines.begin("dense weights", 100)
        lines.advance(60)
        lines.advance(40)
    assert [record.getMessage() for record in caplog.records] == [
        "loaded dense weights: 0.0 MiB in 0.0 s",
    ]


def test_a_terminal_that_other_processes_write_to_gets_lines() -> None:
    """The children of `serve` have the terminal, but not its foreground."""
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as terminal:
        assert terminal.isatty()
        with loading_progress(logging.getLogger("loading"), terminal) as lines:
            assert isinstance(lines, LogProgress)


def test_loading_stops_between_two_tensors(folder: Path) -> None:
    spec, recorder, stopped = load_spec(folder), Recorder(), threading.Event()
    stopped.set()
    with pytest.raises(LoadStopped):
        load_experts(folder, spec, dtype=torch.bfloat16, device=CPU, progress=Stoppable(recorder, stopped))
    ((total, read),) = recorder.phases
    assert 0 < read < total / 8
