"""Which instructions launched kernels are made of on an H200: what no interpreter shows, and what their speed rests on.

``test_launches.py`` looks at all launches; these are claims about single kernels.
"""

from __future__ import annotations

import re

import pytest
from testkit.gpu import aot

SENDS = ["send_rows_kernel", "send_answers_kernel", "send_joined_kernel"]
FEW, MANY = "exchange-bf16-8", "exchange-fp32-512-unsummed"
"""Pairs are counted while rows are taken, or when answers are sent."""
WAITS = [
    (FEW, "take_rows_kernel"), (MANY, "take_rows_kernel"), (FEW, "wait_answers_kernel"), (MANY, "sum_answers_kernel"),
    (FEW, "take_joined_kernel"),
]  # fmt: skip
QUANTISED = [f"experts-bf16-1-{kind}" for kind in ("int4", "int8", "int4-channel", "int8-channel")]


def launch(call: str, kernel: str, at: int = 0) -> aot.Launch:
    return [each for each in aot.launches(call, "sm_90") if each.name == kernel][at]


def code(call: str, kernel: str, at: int = 0) -> aot.Compiled:
    return launch(call, kernel, at).compiled()


def test_gate_and_up_are_one_instruction_of_full_width() -> None:
    gated = launch("experts-bf16-4096", "grouped_gemm_kernel")
    assert gated.constants["GATED"]
    assert f"HGMMA.64x{2 * gated.constants['BLOCK_N']}x16" in gated.compiled().sass


@pytest.mark.parametrize(
    ("call", "kernel", "instruction"),
    [
        ("combine-bf16", "combine_kernel", r"ld\.global\.v4"),
        ("decode-bf16-32-4-128", "sum_parts_kernel", r"ld\.global\.v4"),
        ("decode-bf16-32-4-128", "paged_decode_kernel", r"cp\.async\.cg\.shared\.global \[.*?0x10"),
        ("latents-bf16-128-576-512", "paged_latent_kernel", r"cp\.async\.cg\.shared\.global \[.*?0x10"),
        (FEW, "gather_joined_kernel", r"ld\.global\S*\.cg\S*\.v4"),
        (FEW, "gather_joined_kernel", r"st\.global\.v4"),
        ("qk-bf16-head", "qk_norm_rope_kernel", r"st\.global\.v4"),
        ("qk-bf16-part", "qk_norm_rope_kernel", r"ld\.global\.v4"),
        ("qk-bf16-part", "qk_norm_rope_kernel", r"st\.global\.v4"),
        pytest.param("trained-linear-bf16", "clear_absent_kernel", r"st\.global\.v4"),
    ],
)
def test_rows_are_moved_16_bytes_at_a_time(call: str, kernel: str, instruction: str) -> None:
    assert re.search(instruction, code(call, kernel).ptx)


def test_attention_multiplies_on_tensor_cores() -> None:
    assert code("decode-bf16-32-4-128", "paged_decode_kernel").count("HMMA")
    assert code("latents-bf16-16-576-512", "paged_latent_kernel").count("HMMA")


def test_many_heads_read_a_latent_by_warpgroups() -> None:
    aot.assert_wgmma(code("latents-bf16-128-576-512", "paged_latent_kernel"))


def test_the_router_reduces_within_warps() -> None:
    """Two per choice and one for the softmax's maximum; rows never wait for each other but to store."""
    assert code("route-softmax", "_route_kernel").count("REDUX") == 17


@pytest.mark.parametrize(
    ("call", "kernel"),
    [("experts-bf16-300", "small_kernel")]
    + [("experts-bf16-4096", f"{kernel}_kernel") for kernel in ("count", "scan", "place")],
)
def test_a_plan_has_no_atomics_but_the_histograms(call: str, kernel: str) -> None:
    """Sums of counters do not depend on the order."""
    assert set(re.findall(r"\b(?:atom|red)\.\S+", code(call, kernel).ptx)) <= {"atom.shared.add.u32"}


def test_one_token_takes_two_launches() -> None:
    assert [found.name for found in aot.launches("experts-bf16-1", "sm_90")] == ["gemv_in_kernel", "gemv_down_kernel"]


@pytest.mark.parametrize("kernel", ["gemv_in_kernel", "gemv_down_kernel"])
@pytest.mark.parametrize("call", ["experts-bf16-1", *QUANTISED])
def test_one_tokens_weights_come_in_chunks_and_threads_exchange_only_sums(call: str, kernel: str) -> None:
    """One warp has no barrier; its sums go through shuffles. Layouts that differ would put tiles into shared memory."""
    found = launch(call, kernel)
    compiled = found.compiled()
    assert found.options["num_warps"] == 1
    assert compiled.count("BAR") == 0
    assert compiled.count("STS") + compiled.count("LDS") <= 8
    assert len(re.findall(r"LDG\.E\.128\b", compiled.sass)) >= 2 * found.constants["N"]
    aot.assert_no_i2f(compiled)


@pytest.mark.parametrize("kernel", ["gemv_in_kernel", "gemv_down_kernel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_tokens_int4_codes_cost_one_logic_instruction_a_product(dtype: str, kernel: str) -> None:
    compiled = code(f"experts-{dtype}-1-int4", kernel)
    assert 0.8 < compiled.count("LOP3") / compiled.count("FFMA") < 1.25


def test_the_second_launch_asks_for_weights_before_it_waits() -> None:
    """Where it is tuned to have a tile ahead in registers."""
    second = launch("experts-bf16-1-int4-wide", "gemv_down_kernel")
    assert second.constants["STAGES"] == 2
    ptx = second.compiled().ptx
    assert "ld.global.v4" in ptx[: ptx.index("griddepcontrol.wait")]


def test_the_first_launch_lets_the_second_begin_at_once() -> None:
    ptx = code("experts-bf16-1", "gemv_in_kernel").ptx
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.launch_dependents")]


@pytest.mark.parametrize("kernel", ["small_in_kernel", "small_down_kernel"])
@pytest.mark.parametrize("call", ["experts-bf16-16-int4", "experts-bf16-16-int8", "experts-fp16-16-int4"])
def test_quantised_weights_are_unpacked_where_they_lie(call: str, kernel: str) -> None:
    """A thread unpacks what it read: no values go through shared memory, no bytes change places."""
    compiled = code(call, kernel)
    assert not re.search(r"local_alloc %.* : \(tensor<64x(64|128)x(bf16|f16)", compiled.ttgir)
    assert compiled.count("PRMT") < 48


@pytest.mark.parametrize("call", ["experts-bf16-16-summed-by-the-last", "experts-bf16-16-int4-summed-by-the-last"])
def test_whoever_comes_last_sees_all_parts(call: str) -> None:
    """All threads store, one counts with release and acquire, all load past the L1."""
    ptx = code(call, "small_down_kernel").ptx
    (count,) = re.finditer(r"atom\.\S+", ptx)
    assert count[0] == "atom.global.gpu.acq_rel.add.u32"
    before, after = ptx[: count.start()], ptx[count.start() :]
    # Barriers in the basic block that counts: every thread passes them, whatever loop it comes from.
    assert "bar.sync" in before[before.rindex("$L__BB") :]
    assert "bar.sync" in after[: after.index("$L__BB")]
    assert "st.global" in before
    assert "ld.global.cg" not in before
    assert "ld.global.cg" in after


@pytest.mark.parametrize("call", [FEW, MANY])
@pytest.mark.parametrize("kernel", SENDS)
def test_a_flag_is_released_to_other_gpus_after_the_rows(kernel: str, call: str) -> None:
    ptx = code(call, kernel).ptx
    flag = re.search(r"atom\.global\.sys\.release\.exch", ptx)
    assert flag is not None
    assert "st.global.v4" in ptx[: flag.start()]
    assert "bar.sync" in ptx[ptx.rindex("st.global.v4", 0, flag.start()) : flag.start()]


@pytest.mark.parametrize(("call", "kernel"), WAITS)
def test_flags_are_acquired_from_other_gpus_and_lateness_is_looked_at(call: str, kernel: str) -> None:
    ptx = code(call, kernel).ptx
    assert re.search(r"(atom|ld)\.global\.sys\.acquire\.", ptx)
    assert "globaltimer" in ptx


def test_pairs_are_counted_once_and_after_the_flag() -> None:
    """By the side that the launch says; the other has no code for it."""
    counting = {FEW: "take_rows_kernel", MANY: "send_answers_kernel"}
    for call, counter in counting.items():
        for kernel in counting.values():
            assert ("relaxed.add" in code(call, kernel).ptx) == (kernel == counter)
    for call, kernel in ((MANY, "send_answers_kernel"), (FEW, "send_joined_kernel"), (MANY, "send_joined_kernel")):
        ptx = code(call, kernel).ptx
        assert ptx.rindex("release.exch") < ptx.index("relaxed.add")


@pytest.mark.parametrize("call", [FEW, MANY])
def test_nothing_reads_flags_of_a_member_that_its_host_knows_is_out(call: str) -> None:
    """All threads have what they asked for before one writes it down."""
    ptx = code(call, "take_joined_kernel").ptx
    read = [match.end() for match in re.finditer(r"sys\.acquire\.add", ptx)][-1]
    assert "st.global" not in ptx[:read]
    assert "bar.sync" in ptx[read : ptx.index("st.global", read)]


@pytest.mark.parametrize("kernel", ["activation_forward_kernel", "activation_backward_kernel"])
def test_eight_blocks_of_four_warps_hide_the_memory(kernel: str) -> None:
    assert code("trained-mlp-bf16-swiglu", kernel).registers <= 64


@pytest.mark.parametrize("call", ["dequantize-bf16-int4", "dequantize-bf16-int8", "dequantize-fp32-int4"])
def test_dequantising_converts_no_integers(call: str) -> None:
    aot.assert_no_i2f(code(call, "dequantize_kernel"))
