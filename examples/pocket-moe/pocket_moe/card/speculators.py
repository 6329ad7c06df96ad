"""The record of acceptance in, the card's section on speculators out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pocket_moe.card.markdown import markdown_table, prose
from pocket_moe.card.tables import acceptance_rows
from pocket_moe.measure.measure import ALL
from pocket_moe.speculators.drafts_runs import tree_nodes


def speculators(record: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{size / 1e6:.2f}" for size in record["bytes"])
    how = prose(
        f"`speculators/` holds dense llamas ({sizes} MB in bfloat16) that take the target's tokenizer. The first",
        "learned the target's greedy token at every position of training text and of the target's own continuations;",
        "each other one went on from the first, with positions that earlier ones predict at a lower weight.",
        *_floors(record["tried"]),
    )
    ways = prose(
        "One each, k: the first choices of the first k speculators. Merged, k: k different tokens of the whole pool,",
        "everyone's first choice before everyone's second. First alone, k: the k best of speculator 0. Shown are the",
        "domains where speculator 0 does worst and best, and all; `records/acceptance.json` has every domain.",
    )
    text = prose("How often the target's greedy token is among those tokens, at each position of the held-out text:")
    own = prose("The same in the target's own greedy continuations of held-out documents:")
    forced, written = (markdown_table(acceptance_rows(record[kind])) for kind in ("teacher_forcing", "own_output"))
    gain = f"{_gain(record)}\n" if _compared(record) else ""
    return f"## Speculators\n\n{how}\n{gain}{ways}\n{text}\n{forced}\n{own}\n{written}\n{_in_a_row(record)}"


def _floors(tried: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the union reached by that weight, and which weight each shipped speculator has; nothing if unrecorded."""
    boosted = [row for row in tried if row["speculator"] > 0]
    if not boosted:
        return []
    found = "; ".join(
        f"{row['union_aside']:.4f} with speculator {row['speculator']} at {row['floor']:g}" for row in tried
    )
    best = {}
    for row in sorted(boosted, key=lambda row: float(row["union_aside"])):
        best[row["speculator"]] = row["floor"]
    kept = ", ".join(f"the weight {floor:g} for speculator {index}" for index, floor in sorted(best.items()))
    return [f"The union's acceptance on rows kept aside, by that weight: {found}. The best is shipped: {kept}."]


def _compared(record: Mapping[str, Any]) -> bool:
    return all(
        {"merged/2", "first_alone/2"} <= record[kind]["accepted"].keys() for kind in ("teacher_forcing", "own_output")
    )


def _gain(record: Mapping[str, Any]) -> str:
    """What the other speculators add to the first one: the conclusion of the tables."""
    parts = [record["teacher_forcing"]["accepted"], record["own_output"]["accepted"]]
    pairs = [(part["merged/2"][ALL], part["first_alone/2"][ALL]) for part in parts]
    (text, alone), (own, own_alone) = pairs
    verdict = "hardly more often than" if max(a - b for a, b in pairs) < 0.02 else "more often than"
    return prose(
        f"The target's token is among two of the pool {verdict} among two of speculator 0",
        f"alone: at {text:.3f} against {alone:.3f} of positions of held-out text, at",
        f"{own:.3f} against {own_alone:.3f} of the target's own.",
    )


def _in_a_row(record: Mapping[str, Any]) -> str:
    depth, wide = record["depth"], [branches for branches in record["branches"] if branches > 1]
    nodes = ", ".join(f"{tree_nodes(branches)} nodes for k = {branches}" for branches in wide)
    text = prose(
        f"Tokens in a row of {depth}, on that output: how many tokens of a draft of {depth} the target takes before",
        "the first wrong one, without the token that it adds itself. One each, k: the longest of k drafts. Merged and",
        f"first alone, k: a choice among k tokens at each depth (a whole tree: {nodes}).",
    )
    return f"{text}\n{markdown_table(acceptance_rows(record['own_output']['runs']))}"
