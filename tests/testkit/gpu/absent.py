"""GPUs that are not there, and what the product would launch on them: nothing is computed, nothing is read.

Inside of :func:`recorded` tensors of device ``cuda`` have shapes, strides, types and offsets, but no memory, and the
product takes the choices that it takes on that GPU: its tile table, its shared memory, early launches. Each launch goes
through triton's own JIT up to where it would compile: types of arguments, what is known of their divisibility and
of ones, constants and options are those that the GPU's machine code would be made for.

It runs in the compiler process of :mod:`testkit.gpu.aot`, where triton does not interpret.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """``index`` differs, because the product remembers what it has asked a device. ``shared`` in bytes per program."""

    name: str
    index: int
    capability: tuple[int, int]
    multiprocessors: int
    shared: int

    @property
    def arch(self) -> int:
        return self.capability[0] * 10 + self.capability[1]


GPUS = {
    "sm_90": Gpu(name="NVIDIA H200", index=0, capability=(9, 0), multiprocessors=132, shared=227 * 1024),
    "sm_80": Gpu(name="NVIDIA A100-SXM4-80GB", index=1, capability=(8, 0), multiprocessors=108, shared=163 * 1024),
    "sm_100": Gpu(name="NVIDIA B200", index=2, capability=(10, 0), multiprocessors=148, shared=227 * 1024),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What triton's JIT would compile. ``key`` is the same for equal requests, in any process."""

    kernel: str
    source: Any
    target: Any
    options: dict[str, Any]

    @property
    def key(self) -> str:
        import triton

        parts = (triton.__version__, self.kernel, self.source.hash(), str(self.target), sorted(self.options.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def recorded(gpu: Gpu, call: Callable[[], object]) -> list[Request]:
    """The launches of ``call``, in order, each distinct one once."""
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    found: dict[str, Request] = {}

    def note(
        fn: Any, _key: str, signature: Any, device: int, constants: Any, options: Any, attrs: Any, _warmup: bool
    ) -> None:
        request = Request(
            kernel=f"{fn.module}:{fn.__name__}",
            source=ASTSource(fn, signature, constants, attrs),
            target=fn.device_caches[device][2],
            options=dict(options.__dict__),
        )
        found.setdefault(request.key, request)

    with _present(gpu), patch.object(JITFunction, "_do_compile", note):
        call()
    return list(found.values())


@contextmanager
def _present(gpu: Gpu) -> Iterator[None]:
    """Factories of torch know ``gpu`` as device ``cuda``; who asks torch or triton about it gets its numbers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    facts = SimpleNamespace(name=gpu.name, multi_processor_count=gpu.multiprocessors)
    answers = {
        "current_device": lambda: gpu.index,
        "get_device_name": lambda _=None: gpu.name,
        "get_device_capability": lambda _=None: gpu.capability,
        "get_device_properties": lambda _=None: facts,
    }
    active = SimpleNamespace(
        get_current_device=lambda: gpu.index,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", gpu.arch, 32),
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": gpu.shared}),
    )
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **answers))
        stack.enter_context(patch.object(driver, "_active", active))
        # Memory that torch.empty gives on a GPU starts at a multiple of 512 bytes.
        place = functools.partialmethod(lambda tensor: tensor.storage_offset() * tensor.element_size())
        stack.enter_context(patch.object(FakeTensor, "data_ptr", place, create=True))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_sliced_without_cuda())
        stack.enter_context(torch.device("cuda", gpu.index))
        stack.enter_context(torch.no_grad())
        yield


def _sliced_without_cuda() -> Any:
    """Indexing enters the tensor's device, which a torch without CUDA lacks; the operators behind it do not."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Sliced(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.__getitem__:
                return func(*args, **(kwargs or {}))
            tensor, index = args
            axis = 0
            for part in index if isinstance(index, tuple) else (index,):
                if isinstance(part, slice):
                    tensor = torch.ops.aten.slice.Tensor(tensor, axis, part.start, part.stop, part.step or 1)
                    axis += 1
                else:
                    tensor = torch.ops.aten.select.int(tensor, axis, part)
            return tensor

    return Sliced()
