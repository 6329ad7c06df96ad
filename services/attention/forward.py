"""The one loop over layers: rows of a step go up through the dense part here and through the experts by the link.

Legend: T rows of the step, D hidden size, K experts per row.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from services.fabric.experts import ExpertLink
from services.model.dense import DenseModel
from services.model.inputs import PagedKV, StepInputs

HandleT = TypeVar("HandleT")


def forward(model: DenseModel, link: ExpertLink[HandleT], kv: PagedKV, inputs: StepInputs) -> Tensor:
    """``x_TD`` after the last layer, before the final norm. Writes the rows' keys and values to ``kv``.

    Raises:
        ExpertUnavailable: the link found no replica of an expert. ``kv`` may then be partly written; running the
            same inputs again is safe.
    """
    plan = model.plan(inputs, kv.block_size)
    x_TD = model.embed(inputs.token_ids_T)
    for layer, layer_spec in enumerate(model.spec.layers):
        x_TD = model.attention(layer, x_TD, plan, kv)
        h_TD = model.ffn_input(layer, x_TD)
        if layer_spec.kind == "dense":
            x_TD = x_TD + model.dense_ffn(layer, h_TD)
            continue
        expert_ids_TK, weights_TK = model.route(layer, h_TD)
        handle = link.dispatch(layer, h_TD, expert_ids_TK, weights_TK)
        shared_TD = model.shared_expert(layer, h_TD)  # while the rows are away
        y_TD = link.combine(handle)
        x_TD = x_TD + (y_TD if shared_TD is None else y_TD + shared_TD)
    return x_TD
