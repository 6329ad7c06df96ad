"""The one loop over layers: rows of a step go up through the dense part here and through the experts by the link.

Micro-batches of a step climb by turns: while the rows of one are with the experts, another computes attention.
Legend: T rows of the step, D hidden size, K experts per row.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from services.errors import ExpertMeshError
from services.fabric.link import ExpertLink
from services.model.dense import DenseModel
from services.model.inputs import PagedKV, StepInputs

HandleT = TypeVar("HandleT")
Climb = Generator[None, None, Tensor]
"""Stops wherever its rows are away; returns them after the last layer."""


def forward(model: DenseModel, link: ExpertLink[HandleT], kv: PagedKV, micro_batches: Sequence[StepInputs]) -> Tensor:
    """``x_TD`` after the last layer, before the final norm, of all ``micro_batches`` in order. Writes the rows' keys
    and values to ``kv``, and which tokens they are.

    A sequence lies in one micro-batch whole. As many handles are in flight as there are micro-batches.

    Raises:
        ExpertUnavailable: the link found no replica of an expert. ``kv`` may then be partly written; running the
            same inputs again is safe.
    """
    climbs = [_climb(model, link, kv, inputs) for inputs in micro_batches]
    tops: list[Tensor] = []
    try:
        while not tops:
            tops = [x_TD for climb in climbs if (x_TD := _advance(climb)) is not None]
    finally:
        for climb in climbs:
            climb.close()
    return tops[0] if len(tops) == 1 else torch.cat(tops)


def _climb(model: DenseModel, link: ExpertLink[HandleT], kv: PagedKV, inputs: StepInputs) -> Climb:
    plan = model.plan(inputs, kv.block_size)
    kv.write_tokens(inputs.slots_T, inputs.token_ids_T)
    x_TD = model.embed(inputs.token_ids_T)
    kept = {} if inputs.paged is None else {"keep_T": inputs.paged.live}
    for layer, layer_spec in enumerate(model.spec.layers):
        x_TD = model.attention(layer, x_TD, plan, kv)
        h_TD = model.ffn_input(layer, x_TD)
        if layer_spec.kind == "dense":
            x_TD = x_TD + model.dense_ffn(layer, h_TD)
            continue
        expert_ids_TK, weights_TK = model.route(layer, h_TD, **kept)
        handle = link.dispatch(layer, h_TD, expert_ids_TK, weights_TK)
        try:
            shared_TD = model.shared_expert(layer, h_TD)  # while the rows are away
            yield
        except BaseException:  # the other micro-batch failed, or this one; every handle is combined once
            with suppress(ExpertMeshError):
                link.combine(handle)
            raise
        y_TD = link.combine(handle)
        x_TD = x_TD + (y_TD if shared_TD is None else y_TD + shared_TD)
    return x_TD


def _advance(climb: Climb) -> Tensor | None:
    """To the next place where the rows are away, or to the top. All climbs of a step have as many places."""
    try:
        next(climb)
    except StopIteration as top:
        x_TD: Tensor = top.value
        return x_TD
    return None
