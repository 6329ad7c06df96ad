"""Which GPU a worker takes, and how much of its memory is used. The GPUs are made up."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.errors import ConfigError, UnfitDevice
from services.metrics import WorkerMetrics
from services.model.device import check_device, lacking, show_memory, torch_device


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


@pytest.mark.parametrize(
    ("capability", "dtype", "says"),
    [
        ((6, 1), torch.float32, "it has compute capability 6.1, and the kernels need 7.0. Choose another GPU"),
        ((7, 5), torch.bfloat16, "bfloat16 needs 8.0. Give --dtype float16 or float32."),
        ((7, 5), torch.float16, None),
        ((8, 0), torch.bfloat16, None),
        ((10, 0), torch.bfloat16, None),
    ],
)
def test_a_gpu_without_a_needed_feature_says_so(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, says: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU X")
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    gpu = torch.device("cuda:0")
    if says is None:
        assert lacking(capability, dtype) is None
        check_device(gpu, dtype)
        return
    with pytest.raises(UnfitDevice) as refusal:
        check_device(gpu, dtype)
    assert refusal.value.message.startswith("cuda:0 (GPU X) cannot be used: ")
    assert says in refusal.value.message


def test_a_gpu_that_this_torch_has_no_code_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU X")

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(UnfitDevice, match=r"no kernel image is available for execution on the device\. Install"):
        check_device(torch.device("cuda:0"), torch.bfloat16)
    check_device(torch.device("cpu"), torch.bfloat16)
