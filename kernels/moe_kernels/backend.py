"""Which of an op's two implementations runs, the Triton kernel or its reference in plain torch, and how it is entered.

The device decides; :func:`forced` overrules it, for tests and measurements. Triton is not imported here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from moe_kernels.arguments import require

Path = Literal["triton", "torch"]
P = ParamSpec("P")
R = TypeVar("R")

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Triton's interpreter, which takes tensors of any device. Triton reads the variable when it is
imported, so it must be set before the process starts or first thing in it."""

_forced: ContextVar[Path | None] = ContextVar("moe_kernels_path", default=None)


_uncompiled = functools.cache(torch.compiler.disable)
"""Made when dynamo first meets an op: it needs one and the same function each time, or it would compile again."""


def eager(op: Callable[P, R]) -> Callable[P, R]:
    """``op`` as it is, called from compiled code too: ``torch.compile`` leaves its graph before it and goes on after.

    ``torch.compiler.disable`` alone would import the compiler, 1.4 s, with this package.
    """

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(op)(*args, **kwargs)  # type: ignore[no-any-return]
        return op(*args, **kwargs)

    return call


def packed(tensor: Tensor | None) -> Tensor | None:
    """What kernels that take no strides read: itself if it is contiguous, else a copy, as differentiable as it is."""
    return None if tensor is None else tensor.contiguous()


def use_triton(tensor: Tensor) -> bool:
    """Whether an op on ``tensor`` launches its kernel: on CUDA, unless :func:`forced` says otherwise."""
    path = _forced.get()
    return tensor.is_cuda if path is None else path == "triton"


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes ``tensor``'s GPU the current one: Triton launches on that, wherever a kernel's tensors lie.

    Every public op enters it before its first launch, so ops run on the current stream of their tensors' device.
    Backward passes need none: autograd's threads have their device set.
    """
    here = not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(tensor.device)


@contextmanager
def forced(path: Path) -> Iterator[None]:
    """Every op called inside takes ``path``, in this thread and task. Kernels on CPU tensors need the interpreter.

    Raises:
        ArgumentError: no such path.
    """
    require(path in get_args(Path), f"path must be one of {get_args(Path)}, found {path!r}")
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


def upcast(dtype: torch.dtype) -> bool:
    """Whether a kernel must widen operands of ``dtype`` to float32 before ``tl.dot``.

    The interpreter multiplies the bit patterns of bfloat16 instead of their values (triton-lang/triton#11585).
    """
    return INTERPRETED and dtype == torch.bfloat16
