"""Names and shapes on disk of the tensors of layers with a recurrence (gated delta rule) in place of attention."""

from __future__ import annotations

from services.model.spec import ModelSpec, RecurrentSpec

IN_PROJECTIONS = {
    True: ("in_proj_qkvz", "in_proj_ba"),
    False: ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
"""Projections of a layer's rows, by :attr:`RecurrentSpec.by_head`: to queries, keys, values and their gate (z), to how
much of a value is written (b), and to the decay (a)."""
CONV, DT_BIAS, A_LOG, NORM, OUT = (
    f"linear_attn.{part}" for part in ("conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight")
)


def in_projections(recurrent: RecurrentSpec) -> dict[str, int]:
    """Return the rows of each projection of a layer's input, by the name of its weight within the layer."""
    channels, values, heads = recurrent.channels, recurrent.values, recurrent.value_heads
    rows = (channels + values, 2 * heads) if recurrent.by_head else (channels, values, heads, heads)
    names = (f"linear_attn.{part}.weight" for part in IN_PROJECTIONS[recurrent.by_head])
    return dict(zip(names, rows, strict=True))


def recurrent_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of such a layer, by name within the layer, without the norms of its rows."""
    recurrent, width = spec.recurrent, spec.hidden_size
    assert recurrent is not None, "the spec has a layer with a recurrence"
    return {name: (rows, width) for name, rows in in_projections(recurrent).items()} | {
        CONV: (recurrent.channels, 1, recurrent.conv),
        DT_BIAS: (recurrent.value_heads,),
        A_LOG: (recurrent.value_heads,),
        NORM: (recurrent.value_dim,),
        OUT: (width, recurrent.values),
    }
