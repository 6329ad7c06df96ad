"""Plans what a step does with recurrent states, once for all layers: which states rows start from, where those after
them go, and how rows lie in chunks (:mod:`services.model.delta_rule`).

Rows of decodes are one token each, at fixed places, so that CUDA graphs hold them. Pieces of prompts lie behind them.
Each is cut into chunks of at most ``CHUNK`` tokens, and where a state has to be kept; the first chunks of all pieces
come first, then the second ones, so that each pass over states is one slice.
Legend: B decodes, S pieces, R their rows, N chunks, L tokens of a chunk, P tokens that the convolution looks back to, E
states that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.model.delta_rule import CHUNK
from services.model.inputs import StateRows, StepInputs
from services.model.state_room import Kept
from services.model.transfer import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One chunk of each of the first ``len(chunks)`` pieces. ``ends_E``: whose states are written after it, counted
    among these pieces, and ``write_E``: where to."""

    chunks: slice
    ends_E: Tensor
    write_E: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecePlan:
    """Pieces in the order of their number of chunks, the most first. Tensors are int64 on the model's device.

    The convolution takes rows with the P before them: of X such rows, ``rows_R`` are the step's, and ``past_SP`` come
    from the states ``read_S``. ``tails_EP`` are what the tokens after them look back to, for the states ``conv_E``.
    ``rows_NL`` has the row of each place of a chunk, R where there is none; ``places_R`` is the way back.
    """

    read_S: Tensor
    rows_R: Tensor
    past_SP: Tensor
    tails_EP: Tensor
    conv_E: Tensor
    rows_NL: Tensor
    places_R: Tensor
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlan:
    """Decodes, which are the step's first rows, and pieces, which are the others; None: there are none."""

    read_B: Tensor
    write_B: Tensor
    pieces: PiecePlan | None


def plan_states(inputs: StepInputs, past: int, device: torch.device) -> StatePlan:
    """Return the plan of a step. ``past``: how many tokens the convolution looks back to."""
    states = inputs.states
    assert states is not None, "a model with recurrent layers gets states with each step"
    decodes = len(states.read_S) - len(inputs.sequences)
    pieces = None
    if inputs.sequences:
        lengths = [rows.length for rows in inputs.sequences]
        pieces = _Pieces(lengths, states, decodes, past, device).plan()
    return StatePlan(read_B=states.read_S[:decodes], write_B=states.write_S[:decodes], pieces=pieces)


class _Pieces:
    """Pieces of ``lengths`` rows, which come behind ``decodes`` sequences of one row each."""

    def __init__(
        self, lengths: Sequence[int], states: StateRows, decodes: int, past: int, device: torch.device
    ) -> None:
        self._past, self._device, self._states, self._decodes = past, device, states, decodes
        kept: list[list[Kept]] = [[] for _ in lengths]
        for one in states.kept:
            kept[one.sequence - decodes].append(one)
        spans = [_spans(length, [one.rows for one in found]) for length, found in zip(lengths, kept, strict=True)]
        self._order = sorted(range(len(lengths)), key=lambda at: -len(spans[at]))
        self._spans = [spans[at] for at in self._order]
        self._kept = [kept[at] for at in self._order]
        self._first = (np.cumsum([0, *lengths[:-1]]))[self._order]
        self._lengths = np.array(lengths)[self._order]

    def plan(self) -> PiecePlan:
        order_S = upload(np.array(self._order) + self._decodes, self._device)
        write_S = self._states.write_S[order_S]
        rows_NL, places_R = self._chunks()
        begin_S = self._first + self._past * np.array(self._order)  # with the past of each piece before it
        past_P = np.arange(self._past)
        rows_R = np.empty(self._lengths.sum(), dtype=np.int64)
        for begin, first, length in zip(begin_S, self._first, self._lengths, strict=True):
            rows_R[first : first + length] = np.arange(begin + self._past, begin + self._past + length)
        after_E = np.concatenate([begin_S + self._lengths, [begin_S[at] + one.rows for at, one in self._all_kept]])
        kept_E = upload(np.array([one.slot for _, one in self._all_kept], dtype=np.int64), self._device)
        return PiecePlan(
            read_S=self._states.read_S[order_S],
            rows_R=upload(rows_R, self._device),
            past_SP=upload(begin_S[:, None] + past_P, self._device),
            tails_EP=upload(after_E.astype(np.int64)[:, None] + past_P, self._device),
            conv_E=torch.cat((write_S, kept_E)),
            rows_NL=upload(rows_NL, self._device),
            places_R=upload(places_R, self._device),
            passes=tuple(self._passes(write_S)),
        )

    @property
    def _all_kept(self) -> list[tuple[int, Kept]]:
        return [(at, one) for at, found in enumerate(self._kept) for one in found]

    def _chunks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ``rows_NL`` and ``places_R``."""
        rows = int(self._lengths.sum())
        longest = max(end - begin for spans in self._spans for begin, end in spans)
        chunks = [(at, span) for number in range(len(self._spans[0])) for at, span in self._numbered(number)]
        rows_NL = np.full((len(chunks), longest), rows, dtype=np.int64)
        for row_L, (at, (begin, end)) in zip(rows_NL, chunks, strict=True):
            row_L[: end - begin] = np.arange(begin, end) + self._first[at]
        places_R = np.empty(rows + 1, dtype=np.int64)
        places_R[rows_NL.ravel()] = np.arange(rows_NL.size)
        return rows_NL, places_R[:rows]

    def _numbered(self, number: int) -> list[tuple[int, tuple[int, int]]]:
        return [(at, spans[number]) for at, spans in enumerate(self._spans) if number < len(spans)]

    def _passes(self, write_S: Tensor) -> list[Pass]:
        first, passes = 0, list[Pass]()
        for number in range(len(self._spans[0])):
            chunks = self._numbered(number)
            ends = [at for at, _ in chunks if number + 1 == len(self._spans[at])]
            kept = [(at, one.slot) for at, (_, end) in chunks for one in self._kept[at] if one.rows == end]
            write_E = torch.cat((write_S[ends[0] : ends[-1] + 1] if ends else write_S[:0], self._slots(kept)))
            ends_E = upload(np.array(ends + [at for at, _ in kept], dtype=np.int64), self._device)
            passes.append(Pass(chunks=slice(first, first := first + len(chunks)), ends_E=ends_E, write_E=write_E))
        return passes

    def _slots(self, kept: Sequence[tuple[int, int]]) -> Tensor:
        return upload(np.array([slot for _, slot in kept], dtype=np.int64), self._device)


def _spans(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the chunks of a piece: they end at ``cuts``, and have ``CHUNK`` tokens at most."""
    edges = [0, *sorted(cuts), length]
    return [
        (begin, min(begin + CHUNK, after)) for edge, after in pairwise(edges) for begin in range(edge, after, CHUNK)
    ]
