"""Trained folders and held-out text in, perplexity by domain of the model in every form out: the card's main table.

All forms read the weights as shipped; "fp32" and "bf16" are the arithmetic. Quantised experts work among bf16 layers,
as they are served. A document longer than a row is read in pieces of a row each, every piece without what came before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from pocket_moe.corpus.shards import Shards
from pocket_moe.measure.heldout import Heldout
from pocket_moe.measure.shuffled import derange, randomise
from pocket_moe.model import export
from pocket_moe.model.fingerprint import fingerprint
from pocket_moe.model.model import PocketMoe
from pocket_moe.model.quantised import quantise

ALL: Final = "all"
"""The row over all tokens, beside the domains."""
SEED: Final = 17
"""Of the shuffled routers."""
SHUFFLED_AT_LEAST: Final = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One column of the table. ``change`` alters the freshly loaded model; it gets the weights in float32."""

    name: str
    title: str
    which: Literal["moe", "dense"] = "moe"
    dtype: torch.dtype = torch.float32
    change: Callable[[PocketMoe], object] | None = None


def _quantised(bits: int, group: int) -> Variant:
    kind = f"g{group}" if group else "channel"
    return Variant(
        name=f"int{bits}_{kind}",
        title=f"int{bits} {kind}",
        dtype=torch.bfloat16,
        change=lambda model: quantise(model, bits, group),
    )


VARIANTS: Final = (
    Variant(name="fp32", title="fp32"),
    Variant(name="bf16", title="bf16", dtype=torch.bfloat16),
    _quantised(8, 0),
    _quantised(8, 128),
    _quantised(4, 0),
    _quantised(4, 128),
    Variant(name="deranged", title="experts permuted", change=lambda model: derange(model, SEED)),
    Variant(name="random", title="random experts", change=lambda model: randomise(model, SEED)),
    Variant(name="dense", title="dense", which="dense"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """``tokens_per_domain`` None: the whole held-out split."""

    moe: Path
    dense: Path
    device: torch.device
    length: int
    tokens_per_domain: int | None = None
    rows: int = 32


def perplexities(
    settings: MeasureSettings, shards: Shards, variants: Sequence[Variant] = VARIANTS, *, pad_id: int = 3
) -> dict[str, Any]:
    """For ``perplexity.json``: nats per token by variant and domain, tokens by domain, and what is claimed of them."""
    weights = {"model": fingerprint(settings.moe), "dense": fingerprint(settings.dense)}
    heldout = Heldout(
        shards,
        settings.device,
        tokens_per_domain=settings.tokens_per_domain or len(shards.tokens),
        length=settings.length,
        pad_id=pad_id,
        rows=settings.rows,
    )
    nats: dict[str, dict[str, float]] = {}
    for variant in variants:
        by_domain = heldout.evaluate(load_variant(settings, variant))
        nats[variant.name] = {name: round(value, 5) for name, value in by_domain.items()}
        nats[variant.name][ALL] = round(heldout.mean(by_domain), 5)
        print(f"{variant.title:<18} {math.exp(nats[variant.name][ALL]):8.3f}", flush=True)
    return {
        "weights": weights,
        "length": settings.length,
        "tokens": heldout.tokens | {ALL: sum(heldout.tokens.values())},
        "titles": {variant.name: variant.title for variant in variants},
        "order": [variant.name for variant in variants],
        "nats": nats,
        "claims": claims(nats),
    }


def load_variant(settings: MeasureSettings, variant: Variant) -> PocketMoe:
    """In evaluation mode on the device."""
    folder = settings.moe if variant.which == "moe" else settings.dense
    model = export.load(folder, torch.float32, settings.device)
    if variant.change is not None:
        variant.change(model)
    return model.to(variant.dtype)


def claims(nats: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Ratios of perplexity over that of the model in fp32, over all tokens, and where the dense model is better."""
    base = nats["fp32"]
    ratios = {name: round(math.exp(values[ALL] - base[ALL]), 5) for name, values in nats.items() if name != "fp32"}
    dense = nats.get("dense", {})
    return {
        "ratio_over_fp32": ratios,
        "dense_wins_in": sorted(name for name, value in dense.items() if name != ALL and value <= base[name]),
    }


def failures(record: Mapping[str, Any]) -> list[str]:
    """Which of the model's claims the measurement does not bear out, as sentences."""
    ratios = record["claims"]["ratio_over_fp32"]
    found = []
    if ratios.get("dense", math.inf) <= 1:
        found.append(f"The dense model is not worse: its perplexity is {ratios['dense']:.3f} times the MoE's.")
    found += [
        f"With {title} perplexity is only {ratios[name]:.3f} times as high, not {SHUFFLED_AT_LEAST}."
        for name, title in (("deranged", "permuted experts"), ("random", "random experts"))
        if ratios.get(name, math.inf) < SHUFFLED_AT_LEAST
    ]
    return found


def table(record: Mapping[str, Any], variants: Sequence[str] = ()) -> list[list[str]]:
    """Header and rows of perplexities, a domain a row, all tokens last; of all variants where none are named."""
    names = variants or record["order"]
    rows = [["domain", "tokens", *(record["titles"][name] for name in names)]]
    for domain in [*(name for name in record["tokens"] if name != ALL), ALL]:
        values = (f"{math.exp(record['nats'][name][domain]):.2f}" for name in names)
        rows.append([domain, f"{record['tokens'][domain]:,}", *values])
    return rows


def csv_rows(record: Mapping[str, Any]) -> list[tuple[str, str, int, float, float]]:
    """variant, domain, tokens, nats, perplexity."""
    return [
        (name, domain, record["tokens"][domain], nats, round(math.exp(nats), 4))
        for name in record["order"]
        for domain, nats in record["nats"][name].items()
    ]
