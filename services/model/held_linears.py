"""Decides how the linear layers outside of experts are held, by --dense-format and by how they are stored. Torch-free.

Matrices that meet the same rows are one product: queries, keys and values, gate and up projection. They are held
quantised together, where all are stored alike, or not at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from services.config import DenseFormat
from services.model.dense_format import NO_LINEARS, HeldLinears, linears_held
from services.model.expert_format import Kind
from services.model.held_experts import StoredKind, why_dense
from services.model.names import LM_HEAD, FfnNames, TensorNames, dense_shapes, first_projections
from services.model.recurrent_names import OUT, in_projections
from services.model.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer: matrices of ``rows`` rows each, one below the other, under their ``names`` on disk."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int

    @property
    def name(self) -> str:
        """The name that :class:`HeldLinears` has for it."""
        return self.names[0]


def qkv(spec: ModelSpec, layer: int) -> Linear:
    """The projections of a layer to queries, keys and values, or to latents, and of what else its rows become."""
    rows = {f"self_attn.{part}.weight": size for part, size in first_projections(spec).items()}
    if spec.layers[layer].recurrent and spec.recurrent is not None:
        rows = in_projections(spec.recurrent)
    names = tuple(TensorNames(spec.family).layer(layer, part) for part in rows)
    return Linear(names=names, rows=tuple(rows.values()), columns=spec.hidden_size)


def latent_queries(spec: ModelSpec, layer: int) -> Linear | None:
    """The projection of the latents of queries to queries, where there are such latents. That of the latents of keys
    and values to heads is always dense: a product of each head takes a part of it."""
    if spec.latent is None or not spec.latent.query_rank:
        return None
    name = TensorNames(spec.family).layer(layer, "self_attn.q_b_proj.weight")
    return Linear(names=(name,), rows=(spec.q_size,), columns=spec.latent.query_rank)


def output(spec: ModelSpec, layer: int) -> Linear:
    """The projection of a layer's attention back to its rows."""
    part, columns = "self_attn.o_proj.weight", spec.o_size
    if spec.layers[layer].recurrent and spec.recurrent is not None:
        part, columns = OUT, spec.recurrent.values
    name = TensorNames(spec.family).layer(layer, part)
    return Linear(names=(name,), rows=(spec.hidden_size,), columns=columns)


def network(spec: ModelSpec, names: FfnNames, width: int) -> tuple[Linear, Linear]:
    """Gate and up projection, and down projection, of a network of ``width`` that is no routed expert."""
    hidden = spec.hidden_size
    both = Linear(names=(names.gate, names.up), rows=(width, width), columns=hidden)
    return both, Linear(names=(names.down,), rows=(hidden,), columns=width)


def head(spec: ModelSpec) -> Linear:
    """The output head, where it is not the embedding."""
    return Linear(names=(LM_HEAD,), rows=(spec.vocab_size,), columns=spec.hidden_size)


def linears(spec: ModelSpec) -> Iterator[Linear]:
    """Yield the linear layers that may be held quantised: all but routers and gates of shared experts."""
    names = TensorNames(spec.family)
    for layer in range(spec.num_layers):
        yield qkv(spec, layer)
        if (queries := latent_queries(spec, layer)) is not None:
            yield queries
        yield output(spec, layer)
        if spec.layers[layer].kind == "dense":
            yield from network(spec, names.dense_ffn(layer), spec.dense_ffn)
        elif spec.shared_ffn:
            yield from network(spec, names.shared_expert(layer), spec.shared_ffn)
    if not spec.tie_embeddings:
        yield head(spec)


def held_linears(spec: ModelSpec, choice: DenseFormat, stored: StoredKind) -> HeldLinears:
    """Return how linear layers are held, and log which are not as they are stored."""
    if choice == "dense":
        return NO_LINEARS
    if spec.quantisation is None:
        log.warning("--dense-format %s changes nothing: the checkpoint is not quantised", choice)
        return NO_LINEARS
    kinds = {linear.name: _as_stored(linear, stored) for linear in linears(spec)}
    if kinds.get(LM_HEAD) is None:
        kinds.pop(LM_HEAD, None)  # tools mostly leave it as it is, which makes no mixture of the others
    count = sum(kind is not None for kind in kinds.values())
    dense = next((linear for linear in linears(spec) if kinds.get(linear.name, linear) is None), None)
    why = "" if dense is None else f"; {why_dense(dense.names, stored)}"
    log.info("%d of %d linear layers outside of experts are held as they are stored%s", count, len(kinds), why)
    return linears_held(kinds)


def _as_stored(linear: Linear, stored: StoredKind) -> Kind | None:
    kinds = set(map(stored, linear.names))
    return kinds.pop() if len(kinds) == 1 else None


def dense_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of all weights but the experts', held as ``spec.linears`` says; ``itemsize`` is of a number that
    is dense."""
    total = itemsize * sum(map(math.prod, dense_shapes(spec).values()))
    for linear, kind in _quantised(spec):
        rows = sum(linear.rows)
        total += kind.nbytes(rows, linear.columns) - itemsize * rows * linear.columns
    return total


def linears_kept_on_cpu(spec: ModelSpec, dtype: str) -> int:
    """Return the most bytes that a CPU which serves in ``dtype`` keeps beside those that are held quantised."""
    return sum(kind.kept_on_cpu(sum(linear.rows), linear.columns, dtype) for linear, kind in _quantised(spec))


def _quantised(spec: ModelSpec) -> Iterator[tuple[Linear, Kind]]:
    kinds = dict(spec.linears.kinds)
    for linear in linears(spec) if kinds else ():
        if linear.name in kinds:
            yield linear, kinds[linear.name]
