"""What a provider is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bench.case import Case
from bench.timing import Call

Prepare = Callable[[Case], Call]
"""Allocates what the call needs beforehand. The call takes the number of the weights' copy and returns the output."""


class Unsupported(Exception):
    """The provider has no such op or dtype, or is not installed."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Unsupported(message)


def module(name: str) -> Any:
    """A peer's module, found by name: the bench runs where the peer is not installed. Raises Unsupported there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(f"{name}: {error}") from error
