"""Weights that another worker sends are those of the checkpoint, or are not used: the sender is not trusted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from testkit.fabric.peer_weights import digests_of
from testkit.fabric.tcp import CALM, SECRET, hello, lanes_of, seat_of, serve, table_of
from testkit.models.checkpoints import save_checkpoint
from testkit.waiting import until
from torch import Tensor

from services.config import Settings
from services.errors import SeatLost, WeightsMismatch
from services.experts import serving
from services.experts.serving import Loader, TcpServing
from services.experts.verify import Verifier
from services.experts.weight_sources import given
from services.fabric.nccl import weights as nccl_weights
from services.fabric.nccl.weights import WeightsGiver, fetch
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.handshake import Hello
from services.model.digests import FILE, write_digests
from services.model.experts import ExpertWeights
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec
from services.model.weights import load_experts
from services.routing import ShardGroup, even_groups

CPU = torch.device("cpu")
Change = Callable[[dict[int, ExpertWeights]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


class Joining:
    """A worker that joins next to a source that holds the checkpoint's experts, changed by ``change``."""

    def __init__(self, folder: Path, tmp_path: Path, change: Change = lambda _held: None) -> None:
        (secret := tmp_path / "secret").write_bytes(SECRET)
        self.spec, self.folder = load_spec(folder), folder
        (self.group,) = even_groups(list(self.spec.moe_layers), self.spec.num_experts, 1)
        self.disk = load_experts(folder, self.spec, dtype=torch.float32, device=CPU)
        change(held := load_experts(folder, self.spec, dtype=torch.float32, device=CPU))
        self.source = serve(
            lane="gloo", weights=given(held), hello=_hello(self.spec), experts=self.group.experts
        )  # fmt: skip
        seats = [seat_of(self.source, 0)]
        table = table_of(*seats, groups=[self.group], experts=self.spec.num_experts)
        settings = Settings(model=folder, fabric_secret_file=secret, dtype="float32")
        self.loader = Loader(
            settings, self.spec, worker="joins", dtype=torch.float32, device=CPU, version="0", tables=lambda: table
        )
        self.serving: TcpServing | None = None

    def joins(self) -> dict[int, tuple[tuple[int, ...], dict[str, Tensor]]]:
        """What it then holds itself."""
        self.serving = self.loader(self.group, 1, threading.Event())
        giver, *_ = self.serving.server._extensions
        assert isinstance(giver, WeightsGiver)
        return giver._held  # type: ignore[return-value]

    def holds_the_checkpoint(self) -> bool:
        held = self.joins()
        return all(
            torch.equal(held[layer][1][name], tensor)
            for layer, (_, tensors) in given(self.disk).items()
            for name, tensor in tensors.items()
        )

    def close(self) -> None:
        self.source.close()
        if self.serving is not None:
            self.serving.drain(0.0)


def _hello(spec: ModelSpec) -> Hello:
    return Hello(fingerprint=spec.fingerprint, worker="experts-0", hidden=spec.hidden_size, dtype="float32", seat=0)


@pytest.fixture
def joining(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Joining]]:
    """Workers that join, with lanes over gloo in place of NCCL."""
    monkeypatch.setattr(serving, "lanes_for", lambda *_: lanes_of("gloo", required=False))
    made: list[Joining] = []

    def make(change: Change = lambda _held: None) -> Joining:
        made.append(Joining(folder, tmp_path, change))
        return made[-1]

    write_digests(folder)
    yield make
    for one in made:
        one.close()


def one_bit(layer: int, name: str, word: int, bit: int) -> Change:
    def change(held: dict[int, ExpertWeights]) -> None:
        getattr(held[layer], name).view(-1).view(torch.int32)[word] ^= 1 << bit

    return change


def swapped(held: dict[int, ExpertWeights]) -> None:
    """Two experts, each as it should be, in each other's place."""
    matrices = held[1].w_down_EDF
    matrices[[0, 1]] = matrices[[1, 0]]


def test_an_honest_peers_weights_are_taken(joining: Callable[..., Joining], caplog: pytest.LogCaptureFixture) -> None:
    worker = joining()
    with caplog.at_level(logging.INFO):
        assert worker.holds_the_checkpoint()
    assert "weights of group 0 came from seat 0" in caplog.text
    assert worker.loader.faults.totals() == {}


@pytest.mark.parametrize(
    "change",
    [
        one_bit(0, "w_gate_up_E2FD", 0, 0),
        one_bit(1, "w_gate_up_E2FD", -1, 30),
        one_bit(0, "w_down_EDF", 1234, 7),
        swapped,
    ],
    ids=["the first bit", "the last matrix", "in between", "two experts swapped"],
)
def test_a_peer_that_changed_one_bit_is_found_and_the_disk_is_read(
    joining: Callable[..., Joining], caplog: pytest.LogCaptureFixture, change: Change
) -> None:
    """Its own checksums are right: they are of what it gives."""
    worker = joining(change)
    assert worker.holds_the_checkpoint()
    assert worker.loader.faults.totals() == {"weights_mismatch": 1}
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "seat 0 (experts-0)" in logged.getMessage()
    assert "is not what the checkpoint holds" in logged.getMessage()


def test_where_the_checkpoint_has_no_digests_nobody_is_asked(
    joining: Callable[..., Joining], caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    worker = joining(swapped)
    (folder / FILE).unlink()
    with caplog.at_level(logging.INFO):
        assert worker.holds_the_checkpoint()
    assert "`expertmesh digests FOLDER` writes it" in caplog.text
    assert not worker.source._reception._threads
    assert worker.loader.faults.totals() == {}


def test_a_peer_that_lives_and_gives_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_weights, "_TENSOR_S", 0.5)
    asked = threading.Event()

    monkeypatch.setattr(WeightsGiver, "_give", lambda *_: asked.set())
    server, lanes = serve(lane="gloo"), lanes_of("gloo")
    facts = Facts(hello=hello(), secret=SECRET, timing=CALM, max_bytes=1 << 20, lanes=lanes)
    try:
        with pytest.raises(SeatLost):
            fetch(seat_of(server, 0), facts, {0: [0]}, {0: {"down": (1, 4, 6)}}, torch.float32)
        assert asked.is_set()
    finally:
        server.close()
        assert lanes is not None
        lanes.wait_ended()


def held() -> dict[int, ExpertWeights]:
    gate_up, down = torch.randn(3, 12, 4), torch.randn(3, 4, 6)
    return {0: ExpertWeights(expert_ids=(1, 4, 5), w_gate_up_E2FD=gate_up, w_down_EDF=down)}


def test_a_wrong_tensor_ends_the_taking_while_others_come() -> None:
    layers = held()
    group = ShardGroup(number=0, experts={0: (1, 4, 5)})
    with Verifier(digests_of(layers, 6), group.experts) as verifier:
        verifier.take(0, "gate_up", layers[0].w_gate_up_E2FD)
        verifier.finish()
        verifier.take(0, "down", layers[0].w_down_EDF + 1)
        until(lambda: verifier._pending[0].done(), "it was hashed")
        with pytest.raises(WeightsMismatch, match="down of expert 1 in layer 0"):
            verifier.take(0, "gate_up", layers[0].w_gate_up_E2FD)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_in_a_wider_type_are_verified_to_the_last_bit(stored: torch.dtype) -> None:
    """Also those bits that no value of the type on the disk has."""
    narrow = held()[0].w_down_EDF.to(stored)
    narrow[0, 0, 0] = -0.0
    weights = ExpertWeights(expert_ids=(1, 4, 5), w_gate_up_E2FD=narrow, w_down_EDF=narrow)
    served = narrow.float()
    with Verifier(digests_of({0: weights}, 6), {0: (1, 4, 5)}) as verifier:
        verifier.take(0, "down", served)
        verifier.finish()
        served[1].view(-1).view(torch.int32)[3] ^= 1
        verifier.take(0, "down", served)
        with pytest.raises(WeightsMismatch, match="expert 4"):
            verifier.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_every_type_are_verified(dtype: torch.dtype) -> None:
    layers = {
        layer: ExpertWeights(
            expert_ids=weights.expert_ids,
            w_gate_up_E2FD=weights.w_gate_up_E2FD.to(dtype),
            w_down_EDF=weights.w_down_EDF.to(dtype),
        )
        for layer, weights in held().items()
    }
    with Verifier(digests_of(layers, 6), {0: (1, 4, 5)}) as verifier:
        verifier.take(0, "down", layers[0].w_down_EDF)
        verifier.finish()
        layers[0].w_down_EDF[2, -1, -1] += 1
        verifier.take(0, "down", layers[0].w_down_EDF)
        with pytest.raises(WeightsMismatch, match="expert 5"):
            verifier.finish()
