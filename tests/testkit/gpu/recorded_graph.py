"""A stand-in for CUDA graphs where there is no GPU: it records a step's operations and repeats those alone.

A replay runs the operations, not the Python code around them. So it shows what a graph would do with a number that
Python read at the capture, a tensor that was replaced since, or a result that was left in the graph's own memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from moe_kernels.exchange import reference as exchange
from moe_kernels.experts import reference as experts
from moe_kernels.paged_attention import reference as paged_attention
from moe_kernels.paged_decode import reference as paged_decode
from moe_kernels.paged_latent import reference as paged_latent

KERNELS = (
    (InterpretedFunction, "run"),
    (experts, "fused_moe"),
    (paged_attention, "launch"),
    (paged_decode, "launch"),
    (paged_latent, "launch"),
    *((exchange, name) for name in ("send_rows", "take_rows", "send_answers", "sum_answers")),
)
"""What is launched as a whole. On a GPU these are kernels, so what happens inside may read values."""
OF_THE_HOST = (
    *((torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "__array__")),
    *((torch, name) for name in ("tensor", "as_tensor", "from_numpy")),
)
"""What moves values between host and device, and calls no operator on a CPU."""
MASKED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
GARBAGE = 0xFF
"""Each byte of the graph's own memory while it does not run: floats are not numbers then, whole numbers are -1."""

_ONE_AT_A_TIME = threading.Lock()
"""Functions are replaced for all threads, though only the one that captures notices."""


class CaptureError(RuntimeError):
    """The work does what no capture allows."""


class _Graph:
    """Operations in order, and the memory that they made."""

    def __init__(self) -> None:
        self._operations: list[Callable[[], None]] = []
        self._memory: dict[int, Tensor] = {}
        self._kept: list[Any] = []

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, writes: bool) -> Any:
        """Run ``call`` and record it, unless its results are views of its arguments and it ``writes`` nothing."""
        found = call(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        made = list(_tensors(found))
        new = [at for at, tensor in enumerate(made) if _storage(tensor) not in given]
        self._kept.append((args, kwargs, found))
        for at in new:
            whole = made[at].untyped_storage()
            self._memory[whole._cdata] = torch.empty(0, dtype=torch.uint8).set_(whole, 0, (len(whole),))
        if new or writes:
            self._operations.append(partial(_repeat, partial(call, *args, **kwargs), made, new))
        return found

    def overwrite(self) -> None:
        """Leave the graph's memory as another graph of the same pool would."""
        for whole in self._memory.values():
            whole.fill_(GARBAGE)

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self._operations:
                operation()
            self.overwrite()


def _repeat(call: Callable[[], Any], made: list[Tensor], new: list[int]) -> None:
    """Run ``call`` again, and put its results ``new`` where its first results ``made`` lie."""
    found = call()
    if new:
        again = list(_tensors(found))
        for at in new:
            made[at].copy_(again[at])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


class _Operators(TorchDispatchMode):
    """Records what torch runs in the thread that captures."""

    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self._graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to make sure of that costs more than to record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if _waits(func) or (func.overloadpacket in MASKED and _has_mask(args[1])):
            raise CaptureError(f"{func} waits for the device: a capture does not allow that")
        if _made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        return self._graph.run(func, args, kwargs, writes=func._schema.is_mutable)


@cache
def _made_of_others(func: Any) -> bool:
    """Return whether the operator is made of others; under inference mode such operators come whole."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@cache
def _waits(func: Any) -> bool:
    """Return whether the host needs values of the device, whatever the arguments are."""
    return func.overloadpacket not in MASKED and any(tag in func.tags for tag in WAITING)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def record(work: Callable[[], None]) -> Callable[[], None]:
    """A :class:`services.attention.step.cuda_graphs.Capture`: runs ``work`` once and records it.

    Raises:
        CaptureError: ``work`` lets the host wait for the device, or brings values from the host.
    """
    graph = _Graph()
    with torch.inference_mode():
        with _ONE_AT_A_TIME, _patched(graph), _Operators(graph):
            work()
        graph.overwrite()
    return graph.replay


@contextmanager
def _patched(graph: _Graph) -> Iterator[None]:
    """Kernels that this thread launches go to ``graph``, and values of the host are refused."""
    captures, inside = threading.get_ident(), False

    def as_before() -> bool:
        return inside or threading.get_ident() != captures

    def whole(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if as_before():
                return kernel(*args, **kwargs)
            inside = True
            try:
                with torch._C._DisableTorchDispatch():
                    return graph.run(kernel, args, kwargs, writes=True)
            finally:
                inside = False

        return launch

    def refused(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if as_before():
                return function(*args, **kwargs)
            raise CaptureError(f"{name} moves values between host and device: a capture does not allow that")

        return call

    with ExitStack() as patches:
        for owner, name in KERNELS:
            patches.enter_context(patch.object(owner, name, whole(getattr(owner, name))))
        for owner, name in OF_THE_HOST:
            patches.enter_context(patch.object(owner, name, refused(getattr(owner, name), name)))
        yield
