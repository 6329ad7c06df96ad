"""The loop over layers: rows of a step pass the dense part here and the experts behind the link.

Micro-batches alternate (ping-pong): while the rows of one are with the experts, the other one computes attention.
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
from services.model.dense import Added, DenseModel, summed
from services.model.inputs import PagedKV, StepInputs

HandleT = TypeVar("HandleT")
Layers = Generator[None, None, Tensor]
"""A pass through all layers. It yields while its rows are with the experts, and returns the rows of the last layer."""


def forward(model: DenseModel, link: ExpertLink[HandleT], kv: PagedKV, micro_batches: Sequence[StepInputs]) -> Tensor:
    """Run all layers. Returns ``x_TD`` after the last one, before the final norm, of all ``micro_batches`` in order.

    Writes the rows' keys, values and token ids to ``kv``. Each sequence must lie in one micro-batch. As many handles
    are in flight as there are micro-batches.

    Raises:
        ExpertUnavailable: the link found no replica of an expert. ``kv`` may then be partly written; running the
            same inputs again is safe.
    """
    passes = [_layers(model, link, kv, inputs) for inputs in micro_batches]
    ended: list[Tensor] = []
    try:
        while not ended:
            ended = [x_TD for one in passes if (x_TD := _advance(one)) is not None]
    finally:
        for one in passes:
            one.close()
    return ended[0] if len(ended) == 1 else torch.cat(ended)


def _layers(model: DenseModel, link: ExpertLink[HandleT], kv: PagedKV, inputs: StepInputs) -> Layers:
    plan = model.plan(inputs, kv.block_size)
    kv.write_tokens(inputs.slots_T, inputs.token_ids_T)
    x_TD = model.embed(inputs.token_ids_T)
    added: Added = ()
    kept = {} if inputs.paged is None or inputs.paged.live is None else {"keep_T": inputs.paged.live}
    for layer, layer_spec in enumerate(model.spec.layers):
        x_TD, y_TD = model.attention(layer, x_TD, added, plan, kv)
        x_TD, h_TD = model.ffn_input(layer, x_TD, y_TD)
        if layer_spec.kind == "dense":
            added = (model.dense_ffn(layer, h_TD),)
            continue
        expert_ids_TK, weights_TK = model.route(layer, h_TD, **kept)
        handle = link.dispatch(layer, h_TD, expert_ids_TK, weights_TK)
        try:
            shared_TD = model.shared_expert(layer, h_TD)  # while the experts compute
            yield
        except BaseException:  # one of the micro-batches failed, but every handle has to be combined once
            with suppress(ExpertMeshError):
                link.combine(handle)
            raise
        y_TD = link.combine(handle)
        added = (y_TD,) if shared_TD is None else (y_TD, shared_TD)
    return summed(x_TD, added)


def _advance(layers: Layers) -> Tensor | None:
    """Run to the next exchange, or to the end, which returns the rows. All micro-batches have as many exchanges."""
    try:
        next(layers)
    except StopIteration as end:
        x_TD: Tensor = end.value
        return x_TD
    return None
