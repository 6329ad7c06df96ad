"""Text from the bench's command lines in, values out: argparse types, whose refusals say what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

import torch

from bench.shapes import LayerShape, find


def several(text: str) -> list[str]:
    """Parts between commas. Example: "1, 8," -> ["1", "8"]."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError("name at least one")
    return parts


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Several out of ``known``."""
    allowed = tuple(known)

    def parse(text: str) -> list[str]:
        found = several(text)
        if unknown := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(allowed)}")
        return found

    return parse


def shapes(text: str) -> list[LayerShape]:
    """Several, each as :func:`bench.shapes.find` takes it."""
    try:
        return [find(name) for name in several(text)]
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(unknown.args[0]) from unknown


def whole(lowest: int) -> Callable[[str], int]:
    """A whole number of at least ``lowest``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return number

    return parse


def rows(text: str) -> list[int]:
    """Several counts of tokens. None is below 1: a call without rows has no floor and nothing to compare."""
    return [whole(1)(part) for part in several(text)]


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def device(text: str) -> str:
    """One GPU is measured at a time, the current one, so there are no indices."""
    if text not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cuda nor cpu (CUDA_VISIBLE_DEVICES picks the GPU)")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no GPU here; cpu is left")
    return text


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
