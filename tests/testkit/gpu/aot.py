"""Kernels compiled for an H200 (sm_90) on a machine without a GPU, and what must hold of the machine code.

    compiled = aot.compile_sm90(
        "moe_kernels.plan.kernel:_kernel",
        {"ids": "*i32", "x": "*bf16", "y": "tensordesc<bf16[128,64]>", "rows": "i32:16", "scale": "fp32"},
        {"BLOCK": 128, "DTYPE": "tl.bfloat16"},
        num_warps=4, num_stages=3,  # and num_ctas, maxnreg, launch_pdl
    )
    aot.assert_wgmma(compiled)

The signature names every argument that is not a constexpr. Pointers count as aligned to 16 bytes, as torch's
allocations are; ``*bf16:1`` is one that is not. An integer counts as divisible by 16 if it says so: ``i32:16``.
A constexpr ``tl.<name>`` stands for that object of triton.language, ``<module>:<name>`` for an object of ours.

    for launch in aot.launches("experts-bf16-16", "sm_90"):  # what that call of testkit.gpu.calls launches there
        aot.assert_no_stack(launch.compiled())

The first call starts a compiler process, which later calls share: this one has interpreted kernels, which cannot be
compiled, and triton decides at import. ``AOT_PYTHON=/some/bin/python pytest ...`` compiles with that Python's triton.
Machine code is kept in ``.cache/aot``, by a hash of the kernel's source, triton's version and all that was asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from testkit.gpu.absent import GPUS, Request, recorded

SMEM_BYTES = 227 * 1024
"""What one thread block of sm_90 may use."""
TARGET = ("cuda", 90, 32)
CACHE = Path(__file__).parents[3] / ".cache" / "aot"
FORMAT = 1
"""Of the cache's files: another number where :func:`_build` answers otherwise."""
KEPT_DAYS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One kernel's machine code. ``stack``, ``smem`` in bytes; ``spills``: instructions that access local memory."""

    kernel: str
    ttgir: str
    ptx: str
    sass: str
    registers: int
    stack: int
    spills: int
    smem: int
    triton: str

    def count(self, opcode: str) -> int:
        """SASS instructions of an opcode, with whatever suffix: ``count("I2F")`` counts I2F.F16 and I2FP too."""
        return len(re.findall(rf"^\s*/\*[0-9a-f]{{4,}}\*/\s+(?:@!?U?P\w+\s+)?{opcode}", self.sass, re.MULTILINE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launch of a call on a GPU: ``signature`` has the types of arguments that are not constants, as the docstring
    above writes them, ``constants`` all others: constexprs, ones and None. Objects of triton are there by their names.
    """

    kernel: str
    call: str
    gpu: str
    key: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    def compiled(self) -> Compiled:
        """The machine code.

        Raises:
            CompileError: triton refused it.
        """
        return _compile(("launch", self.call, self.gpu, self.key))


class CompileError(AssertionError):
    """The kernel does not compile; the message is triton's."""


def compile_sm90(
    kernel: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: Any,
) -> Compiled:
    """``kernel`` is ``module:name``. Equal calls compile once per process.

    Raises:
        CompileError: triton refused it.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    request = ("kernel", kernel, tuple(signature.items()), tuple((constexprs or {}).items()), tuple(options.items()))
    return _compile(request)


@functools.cache
def launches(call: str, gpu: str) -> tuple[Launch, ...]:
    """What the call of that name in :mod:`testkit.gpu.calls` launches on a GPU of :data:`testkit.gpu.absent.GPUS`."""
    found = _ask(("launches", call, gpu))
    return tuple(Launch(call=call, gpu=gpu, **launch) for launch in found)


def assert_wgmma(compiled: Compiled) -> None:
    """Every matrix product runs on Hopper's warpgroup instruction, none on the older HMMA."""
    assert "wgmma.mma_async" in compiled.ptx, f"{compiled.kernel}: no wgmma in the PTX"
    assert not compiled.count("HMMA"), f"{compiled.kernel}: {compiled.count('HMMA')} HMMA in the SASS"


def assert_wgmma_from_registers(compiled: Compiled) -> None:
    """The left operand of each product comes from registers: dequantised weights never visit shared memory."""
    assert_wgmma(compiled)
    products = re.findall(r"wgmma\.mma_async\S*\s+(.*?);", compiled.ptx, re.DOTALL)
    # Accumulators in braces come first; operand A follows: braces again if registers, else a descriptor.
    assert all(text.count("{") == 2 for text in products), f"{compiled.kernel}: a product reads both from shared memory"


def assert_no_stack(compiled: Compiled) -> None:
    assert compiled.stack == 0, f"{compiled.kernel}: {compiled.stack} bytes of stack"
    assert compiled.spills == 0, f"{compiled.kernel}: {compiled.spills} accesses to local memory"


def assert_no_i2f(compiled: Compiled) -> None:
    """Integers become floats by bit patterns, not by the conversion unit (a quarter of the rate or less)."""
    assert not compiled.count("I2F"), f"{compiled.kernel}: {compiled.count('I2F')} I2F in the SASS"


def assert_smem_fits(compiled: Compiled) -> None:
    assert compiled.smem <= SMEM_BYTES, f"{compiled.kernel}: {compiled.smem} bytes of shared memory, not {SMEM_BYTES}"


@functools.cache
def _compile(request: tuple[Any, ...]) -> Compiled:
    return Compiled(**_ask(request))


def _ask(request: tuple[Any, ...]) -> Any:
    process = _compiler()
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    try:
        answer = pickle.load(process.stdout)
    except EOFError:
        _compiler.cache_clear()
        raise CompileError(f"{request[1]}: the compiler process died with {process.wait()}") from None
    if isinstance(answer, str):
        raise CompileError(f"{request[1]}: {answer}")
    return answer


@functools.cache
def _compiler() -> subprocess.Popen[bytes]:
    """Ends when this process does: its standard input closes."""
    spec = importlib.util.find_spec("moe_kernels")
    assert spec is not None
    assert spec.origin is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join(
        str(path) for path in (Path(spec.origin).parents[1], Path(__file__).parents[2])
    )
    environment["CUDA_VISIBLE_DEVICES"] = ""  # GPUs that are there have other numbers and other names
    python = os.environ.get("AOT_PYTHON", sys.executable)
    return subprocess.Popen(
        [python, "-m", "testkit.gpu.aot"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    _forget_old()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        while True:
            try:
                kind, *what = pickle.load(requests)
            except EOFError:
                return
            try:
                answer: object = {"kernel": _kernel, "launch": _launch, "launches": _launches}[kind](*what)
            except Exception:  # noqa: BLE001 - whatever it is, the caller raises it
                answer = traceback.format_exc()
            pickle.dump(answer, answers)
            answers.flush()


def _launches(call: str, gpu: str) -> list[dict[str, Any]]:
    return [_described(request) for request in _recorded(call, gpu).values()]


def _launch(call: str, gpu: str, key: str) -> dict[str, Any]:
    return _built(_recorded(call, gpu)[key])


@functools.cache
def _recorded(call: str, gpu: str) -> dict[str, Request]:
    from testkit.gpu.calls import CALLS

    return {request.key: request for request in recorded(GPUS[gpu], CALLS[call])}


def _described(request: Request) -> dict[str, Any]:
    source = request.source
    by_16 = {path[0] for path, attributes in source.attrs.items() if ["tt.divisibility", 16] in attributes}
    signature = {}
    for at, (name, kind) in enumerate(source.signature.items()):
        suffix = ":16" if at in by_16 and kind.startswith("i") else ":1" if at not in by_16 and kind[0] == "*" else ""
        if kind != "constexpr":
            signature[name] = kind + suffix
    names = list(source.signature)
    constants = {names[path[0]]: _plain(value) for path, value in source.constants.items()}
    return {
        "kernel": request.kernel, "key": request.key, "signature": signature, "constants": constants,
        "options": {name: _plain(value) for name, value in request.options.items()},
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


def _kernel(kernel: str, signature: tuple[Any, ...], constexprs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = _object(kernel)
    constants = {name: _constant(value) for name, value in constexprs}
    types = dict(signature)
    unknown = [name for name in fn.arg_names if (name in types) == (name in constants)]
    assert not unknown, f"in neither or both of signature and constexprs: {unknown}"
    source = ASTSource(
        fn=fn,
        signature={name: types[name].partition(":")[0] if name in types else "constexpr" for name in fn.arg_names},
        constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(fn.arg_names) if _by_16(types.get(name, ""))},
    )
    return _built(Request(kernel=kernel, source=source, target=GPUTarget(*TARGET), options=dict(options)))


def _built(request: Request) -> dict[str, Any]:
    """From the cache, or compiled now. What does not compile is tried again each time."""
    path = CACHE / f"{request.key}-{FORMAT}"
    if path.exists():
        os.utime(path)
        found: dict[str, Any] = pickle.loads(zlib.decompress(path.read_bytes()))
        return found
    built = _build(request)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as file:
        file.write(zlib.compress(pickle.dumps(built)))
    os.replace(file.name, path)
    return built


def _forget_old() -> None:
    for path in CACHE.glob("*"):
        if path.stat().st_mtime < time.time() - KEPT_DAYS * 86_400:
            path.unlink(missing_ok=True)


def _build(request: Request) -> dict[str, Any]:
    import triton

    built = triton.compile(request.source, target=request.target, options=request.options)
    sass, usage = _cuobjdump(built.asm["cubin"])
    return {
        "kernel": request.kernel,
        "ttgir": built.asm["ttgir"],
        "ptx": built.asm["ptx"],
        "sass": sass,
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "smem": built.metadata.shared,
        "triton": triton.__version__,
    }


def _by_16(kind: str) -> bool:
    base, _, divisor = kind.partition(":")
    return divisor == "16" or (base.startswith("*") and not divisor)


def _constant(value: Any) -> Any:
    """Objects of triton and of ours cannot cross from an interpreting process: their names do."""
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value[3:])
    return _object(value) if isinstance(value, str) and ":" in value else value


def _object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _cuobjdump(cubin: bytes) -> tuple[str, dict[str, int]]:
    """SASS and resource usage: ``REG:32 STACK:0 SHARED:0 ...``."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([tool, flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    return sass, {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)\b", usage)}


if __name__ == "__main__":
    # What a kernel or triton prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers)
