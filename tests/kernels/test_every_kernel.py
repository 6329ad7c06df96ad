"""No kernel is launched without proof: a mutation in its own body, and a recorded launch, whose machine code
``test_launches.py`` looks at.

A mutation's test runs the kernel in the interpreter, so a kernel with one has a numerics test that can fail.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from testkit.gpu import aot
from testkit.gpu.calls import MORE, SERVED
from testkit.models.mutations import PACKAGE, load

HERE = Path(__file__).parent
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
MUTATIONS = load(HERE / "mutations.toml")
NOT_SERVED = {
    "activation_backward_kernel", "activation_forward_kernel", "arrange_kernel", "clear_absent_kernel",
    "dequantize_kernel", "expert_of_row_kernel", "group_rows_kernel", "grouped_outer_kernel", "grouped_sum_kernel",
    "pair_dots_kernel", "quantised_linear_kernel", "rotate_kernel", "round_rows_kernel", "rounded_gemm_kernel",
    "small_lists_kernel", "sum_products_kernel",
}  # fmt: skip
"""Of training and of quantised weights."""


def kernels() -> dict[str, tuple[str, ast.FunctionDef]]:
    """File and definition of every function that is compiled by triton and launched: ``name[grid](...)``."""
    compiled: dict[str, tuple[str, ast.FunctionDef]] = {}
    launched = set()
    for file, text in SOURCES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(by) for by in node.decorator_list):
                assert node.name not in compiled or node.name.startswith("_"), f"two kernels are called {node.name}"
                compiled[node.name] = file, node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).rpartition(".")[2])
    return {name: compiled[name] for name in sorted(launched & compiled.keys())}


KERNELS = kernels()


@pytest.mark.parametrize("name", KERNELS)
def test_a_line_of_its_body_is_mutated(name: str) -> None:
    file, definition = KERNELS[name]
    assert definition.end_lineno is not None
    lines = range(definition.body[0].lineno, definition.end_lineno + 1)
    starts = [SOURCES[file][: SOURCES[file].index(each.old)].count("\n") + 1 for each in MUTATIONS if each.file == file]
    assert any(start in lines for start in starts), f"mutations.toml breaks no line of {name} ({file}:{lines.start})"


def test_launches_of_all_that_services_launch_are_recorded() -> None:
    assert _recorded(list(SERVED)) == KERNELS.keys() - NOT_SERVED


def test_launches_of_all_others_are_recorded() -> None:
    assert _recorded(list(MORE)) >= NOT_SERVED


def _recorded(calls: list[str]) -> set[str]:
    return {launch.name for call in calls for launch in aot.launches(call, "sm_90")}
