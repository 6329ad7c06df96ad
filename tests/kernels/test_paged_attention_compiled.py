"""``paged_attention`` as an A100's and an H200's machine code: what it is made of, and that it fits."""

from __future__ import annotations

import pytest
from testkit.gpu import aot
from testkit.gpu.absent import GPUS
from testkit.gpu.calls import ATTENTION


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
@pytest.mark.parametrize("call", ATTENTION)
def test_it_needs_no_more_registers_and_shared_memory_than_there_are(call: str, gpu: str) -> None:
    for launch in aot.launches(call, gpu):
        code = launch.compiled()
        aot.assert_no_stack(code)
        assert code.smem <= GPUS[gpu].shared


@pytest.mark.parametrize("call", [call for call in ATTENTION if "fp32" not in call])
def test_wide_tiles_run_on_hoppers_tensor_cores_and_narrow_ones_on_tensor_cores(call: str) -> None:
    (launch,) = [each for each in aot.launches(call, "sm_90") if each.name == "paged_attention_kernel"]
    code = launch.compiled()
    wide, narrow = launch.constants["WIDE"], launch.constants["NARROW"]
    assert bool(code.count("HGMMA")) == bool(wide or narrow >= 64)
    assert bool(code.count("HMMA")) == (narrow < 64)


def test_keys_and_values_are_brought_ahead_in_16_bytes() -> None:
    for call in ("attention-bf16-32-4-128", "attention-bf16-32-4-128-decodes"):
        ptx = aot.launches(call, "sm_90")[0].compiled().ptx
        assert ptx.count("cp.async.cg.shared.global") >= 16


def test_without_room_for_parts_nothing_is_merged() -> None:
    assert [launch.name for launch in aot.launches("attention-fp16-16-16-192-short", "sm_90")] == [
        "paged_attention_kernel"
    ]


def test_programs_that_share_a_multiprocessor() -> None:
    """What the tiling counts on: three of decodes, whose registers and shared memory lie next to each other."""
    code = aot.launches("attention-bf16-32-4-128-decodes", "sm_90")[0].compiled()
    assert 3 * code.registers * 128 <= 65_536
    assert 3 * (code.smem + 1024) <= aot.SMEM_BYTES
