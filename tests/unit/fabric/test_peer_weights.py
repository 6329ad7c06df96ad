"""Weights that another worker sends are those of the checkpoint, or are not used: the sender is not trusted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from testkit.fabric.peer_weights import digests_of
from testkit.fabric.tcp import CALM, SECRET, Serve, hello, lanes_of, seat_of, serve, table_of
from testkit.models.checkpoints import save_checkpoint
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS, Format, gptq
from testkit.waiting import until

from moe_kernels import QuantisedWeight
from services.config import ExpertFormat, Settings
from services.errors import SeatLost, WeightsMismatch
from services.experts import serving
from services.experts.serving import Loader, TcpServing
from services.experts.verify import Verifier
from services.experts.weight_sources import given
from services.fabric.nccl import weights as nccl_weights
from services.fabric.nccl.weights import WeightsGiver, fetch
from services.fabric.tcp.connect import Facts
from services.model.digests import digests_file, write_digests
from services.model.experts import ExpertWeights
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec
from services.model.weights import load_experts
from services.model.weights_sample import with_weights
from services.routing import ShardGroup, even_groups

CPU = torch.device("cpu")
Change = Callable[[dict[int, ExpertWeights]], object]


@dataclass(frozen=True)
class Model:
    """A checkpoint, how its experts are held, and the option with which `expertmesh digests` names that."""

    folder: Path
    expert_format: ExpertFormat = "auto"
    option: str = ""

    @property
    def spec(self) -> ModelSpec:
        return with_weights(load_spec(self.folder), self.folder, self.expert_format)


@pytest.fixture(
    scope="module", params=["float32", "dequantised", "stored int8", "act-order", "rounded to int8", "biased"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """What is sent, and what digests are of, are the weights as they are held."""
    plain = save_checkpoint(tmp_path_factory.mktemp("model"), "gpt_oss" if request.param == "biased" else "qwen3_moe")
    if request.param in ("float32", "biased"):
        return Model(plain)
    if request.param == "rounded to int8":
        return Model(plain, "int8", " --expert-format int8")
    if request.param == "act-order":
        config = {**FORMATS["gptq-int4"].config, "group_size": 32, "desc_act": True}
        ordered = Format(encode=gptq(4, 32, sorts=True), config=config)
        return Model(quantise(plain, tmp_path_factory.mktemp("ordered"), ordered).folder)
    form, held = ("gptq-int8-row", "int8") if request.param == "stored int8" else ("gptq-int4-act-order", "dense")
    folder = quantise(plain, tmp_path_factory.mktemp("quantised"), FORMATS[form]).folder
    return Model(folder, option=f" --expert-format {held}")


class Joining:
    """A worker that joins next to a source that holds the checkpoint's experts, changed by ``change``."""

    def __init__(self, model: Model, tmp_path: Path, change: Change) -> None:
        (secret := tmp_path / "secret").write_bytes(SECRET)
        self.spec, folder = model.spec, model.folder
        (self.group,) = even_groups(list(self.spec.moe_layers), self.spec.num_experts, 1)
        self.disk = load_experts(folder, self.spec, dtype=torch.float32, device=CPU)
        change(held := load_experts(folder, self.spec, dtype=torch.float32, device=CPU))
        served_by = hello(self.spec.hidden_size, seat=0, fingerprint=self.spec.fingerprint)
        served_by = msgspec.structs.replace(served_by, weights=self.spec.weights)
        self.source = serve(lane="gloo", weights=given(held), hello=served_by, experts=self.group.experts)
        table = table_of(seat_of(self.source, 0), groups=[self.group], experts=self.spec.num_experts)
        settings = Settings(model=folder, fabric_secret_file=secret, dtype="float32")
        self.loader = Loader(
            settings, self.spec, worker="joins", dtype=torch.float32, device=CPU, version="0", tables=lambda: table
        )
        self.serving: TcpServing | None = None

    def holds_the_checkpoint(self) -> bool:
        """Once it has joined."""
        self.serving = self.loader(self.group, 1, threading.Event())
        giver, *_ = self.serving.server._extensions
        assert isinstance(giver, WeightsGiver)
        return all(
            torch.equal(giver._held[layer][1][name], tensor)
            for layer, (_, tensors) in given(self.disk).items()
            for name, tensor in tensors.items()
        )

    def close(self) -> None:
        self.source.close()
        if self.serving is not None:
            self.serving.drain(0.0)


def one_bit(layer: int, name: str, word: int, bit: int) -> Change:
    def change(held: dict[int, ExpertWeights]) -> None:
        weight = getattr(held[layer], name)
        tensor = weight.packed if isinstance(weight, QuantisedWeight) else weight
        tensor.view(-1).view(torch.int32)[word] ^= 1 << bit

    return change


def swapped(held: dict[int, ExpertWeights]) -> None:
    """Two experts, each as it should be, in each other's place."""
    weight = held[1].w_down_EDF
    for matrices in weight.tensors().values() if isinstance(weight, QuantisedWeight) else [weight]:
        matrices[[0, 1]] = matrices[[1, 0]]


@pytest.fixture
def worker(
    request: pytest.FixtureRequest, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Joining]:
    """With lanes over gloo in place of NCCL; the parameter is the change."""
    monkeypatch.setattr(serving, "lanes_for", lambda *_: lanes_of("gloo", required=False))
    write_digests(model.folder, model.expert_format)
    made = Joining(model, tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("worker", [lambda _held: None], indirect=True)
def test_an_honest_peers_weights_are_taken(worker: Joining, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert worker.holds_the_checkpoint()
    assert "loaded the weights of group 0 from experts-0 (seat 0)" in caplog.text
    assert worker.loader.faults.totals() == {}


@pytest.mark.parametrize(
    "worker",
    [
        one_bit(0, "w_gate_up_E2FD", 0, 0),
        one_bit(1, "w_gate_up_E2FD", -1, 30),
        one_bit(0, "w_down_EDF", 1234, 7),
        swapped,
    ],
    ids=["the first bit", "the last matrix", "in between", "two experts swapped"],
    indirect=True,
)
def test_a_peer_that_changed_one_bit_is_found_and_the_disk_is_read(
    worker: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own checksums are right: they are of what it gives."""
    assert worker.holds_the_checkpoint()
    assert worker.loader.faults.totals() == {"weights_mismatch": 1}
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "experts-0 (seat 0)" in logged.getMessage()
    assert "is not what the checkpoint holds" in logged.getMessage()


@pytest.mark.parametrize("worker", [swapped], indirect=True)
def test_where_the_checkpoint_has_no_digests_nobody_is_asked(
    worker: Joining, caplog: pytest.LogCaptureFixture, model: Model
) -> None:
    digests_file(model.folder, model.spec).unlink()
    with caplog.at_level(logging.INFO):
        assert worker.holds_the_checkpoint()
    assert f"`expertmesh digests FOLDER{model.option}` writes the file" in caplog.text
    assert not worker.source._reception._threads
    assert worker.loader.faults.totals() == {}


@pytest.mark.parametrize("name", ["bias_gate_up_E2F", "bias_down_ED"])
def test_a_bias_that_a_peer_changed_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(serving, "lanes_for", lambda *_: lanes_of("gloo", required=False))
    biased = Model(save_checkpoint(tmp_path / "model", "gpt_oss"))
    write_digests(biased.folder)
    worker = Joining(biased, tmp_path, one_bit(1, name, 7, 3))
    request.addfinalizer(worker.close)
    assert worker.holds_the_checkpoint()
    assert worker.loader.faults.totals() == {"weights_mismatch": 1}


def test_a_peer_that_lives_and_gives_nothing_is_left(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, lanes = threading.Event(), lanes_of("gloo")
    assert lanes is not None
    monkeypatch.setattr(nccl_weights, "_TENSOR_S", 0.5)
    monkeypatch.setattr(WeightsGiver, "_give", lambda *_: asked.set())
    facts = Facts(hello=hello(), secret=SECRET, timing=CALM, max_bytes=1 << 20, lanes=lanes)
    with pytest.raises(SeatLost):
        fetch(seat_of(served(lane="gloo"), 0), facts, {0: [0]}, {0: {"down": ((1, 4, 6), torch.float32)}})
    assert asked.is_set()
    lanes.wait_ended()


def held(dtype: torch.dtype = torch.float32) -> dict[int, ExpertWeights]:
    gate_up, down = torch.randn(3, 12, 4).to(dtype), torch.randn(3, 4, 6).to(dtype)
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


def take_all(verifier: Verifier, matrices_E: torch.Tensor) -> None:
    """An error comes from either call: checks go on in threads."""
    verifier.take(0, "down", matrices_E)
    verifier.finish()


@pytest.mark.parametrize(
    ("stored", "served"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_weights_are_verified_to_the_last_bit(stored: torch.dtype, served: torch.dtype) -> None:
    """In a wider type also those bits that no value of the type on the disk has."""
    layers = held(stored)
    layers[0].w_down_EDF[0, 0, 0] = -0.0
    given_EDF = layers[0].w_down_EDF.to(served)
    with Verifier(digests_of(layers, 6), {0: (1, 4, 5)}) as verifier:
        verifier.take(0, "down", given_EDF)
        verifier.finish()
        given_EDF = given_EDF.clone()
        given_EDF[2].view(-1).view(torch.uint8)[-given_EDF.itemsize] ^= 1
        with pytest.raises(WeightsMismatch, match="expert 5"):
            take_all(verifier, given_EDF)
