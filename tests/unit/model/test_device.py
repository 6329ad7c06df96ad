"""Which GPU a worker takes, and how much of its memory is used. The GPUs are made up."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.errors import ConfigError
from services.metrics import WorkerMetrics
from services.model.device import show_memory, torch_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_each_worker_has_the_gpu_of_its_number_and_sharing_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    name = "auto"
    assert [torch_device(f"{name}:{gpu}") for gpu in (0, 1)] == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert torch_device(name) == torch.device("cuda:0")
    assert not caplog.messages
    assert torch_device(f"{name}:3") == torch.device("cuda:1")
    assert caplog.messages == ["GPU 3 does not exist (there are 2); GPU 1 is shared by several workers"]


@pytest.mark.usefixtures("two_gpus")
def test_ranks_on_several_hosts_share_no_gpu_for_being_many(caplog: pytest.LogCaptureFixture) -> None:
    assert torch_device("auto", rank=3) == torch.device("cuda:1")
    assert not caplog.messages


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto", rank=2) == torch_device("auto:2") == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda cannot be used"):
        torch_device("cuda")


def test_memory_is_shown_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    gauge = WorkerMetrics(registry).gpu_memory

    def shown() -> dict[str, float | None]:
        return {
            state: registry.get_sample_value("expertmesh_gpu_memory_bytes", {"state": state})
            for state in ("used", "free")
        }

    show_memory(gauge, torch.device("cpu"))
    assert shown() == {"used": None, "free": None}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 80) if device.index == 1 else (0, 1))
    show_memory(gauge, torch.device("cuda:1"))
    assert shown() == {"used": 30, "free": 50}
