"""A model in, the same model with its experts in 8 or 4 bits out, run by the kernel that serves such experts.

Legend: T rows, D hidden size, K experts of a row.
"""

from __future__ import annotations

from torch import Tensor, nn

import moe_kernels as mk
from pocket_moe.errors import PocketError
from pocket_moe.model.layers import Experts
from pocket_moe.model.model import PocketMoe


class QuantisedExperts(nn.Module):
    """Replaces :class:`pocket_moe.model.layers.Experts`. Codes and scales are no parameters: ``to`` leaves them."""

    def __init__(self, experts: Experts, bits: int, group: int) -> None:
        super().__init__()
        self.w_in = mk.quantize_experts(experts.w_in.detach(), bits, group)
        self.w_out = mk.quantize_experts(experts.w_out.detach(), bits, group)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, plan: mk.Plan) -> Tensor:  # noqa: ARG002
        # The kernel makes its own plan where it needs one: the router's may have another block size.
        return mk.fused_moe(x_TD, self.w_in, self.w_out, ids_TK, weights_TK)

    @property
    def nbytes(self) -> int:
        return self.w_in.nbytes + self.w_out.nbytes


def quantise(model: PocketMoe, bits: int, group: int) -> int:
    """Replace the experts of ``model`` in place; how many bytes they take now.

    Raises:
        PocketError: sizes that this quantisation does not offer.
    """
    size = 0
    for _, mlp in model.moe_layers():
        assert isinstance(mlp.experts, Experts), "quantised once, from the exact weights"
        try:
            quantised = QuantisedExperts(mlp.experts, bits, group)
        except mk.ArgumentError as error:
            raise PocketError(
                f"The experts cannot be quantised: {error}", hint="Choose hidden and expert sizes of 128 columns."
            ) from error
        mlp.experts = quantised
        size += quantised.nbytes
    return size
