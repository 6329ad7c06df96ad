"""No kernel is launched without proof: a mutation in its own body, and machine code that a test looks at.

A mutation's test runs the kernel in the interpreter, so a kernel with one has a numerics test that can fail.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from testkit.models.mutations import PACKAGE, load

HERE = Path(__file__).parent
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
MUTATIONS = load(HERE / "mutations.toml")


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


def test_launches_are_found() -> None:
    """One of each way to write a launch; a scan that finds nothing would prove nothing."""
    assert {"_route_kernel", "small_down_kernel", "expert_of_row_kernel", "rotate_kernel"} <= KERNELS.keys()
    assert "products" not in KERNELS


@pytest.mark.parametrize("name", KERNELS)
def test_a_line_of_its_body_is_mutated(name: str) -> None:
    file, definition = KERNELS[name]
    assert definition.end_lineno is not None
    lines = range(definition.body[0].lineno, definition.end_lineno + 1)
    starts = [SOURCES[file][: SOURCES[file].index(each.old)].count("\n") + 1 for each in MUTATIONS if each.file == file]
    assert any(start in lines for start in starts), f"mutations.toml breaks no line of {name} ({file}:{lines.start})"


@pytest.mark.parametrize("name", KERNELS)
def test_its_machine_code_is_looked_at(name: str) -> None:
    module = KERNELS[name][0].removesuffix(".py").replace("/", ".")
    texts = [path.read_text() for path in HERE.glob("test_*.py") if "compile_sm90(" in path.read_text()]
    # The name may be put together: "moe_kernels.plan.kernel:{kernel}".
    assert any(f"moe_kernels.{module}:" in text and name in text for text in texts), f"no test compiles {name}"
