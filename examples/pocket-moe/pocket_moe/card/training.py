"""Two runs and those that their recipe was chosen from in, the card's section on training out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocket_moe.card.facts import Facts, Training
from pocket_moe.card.markdown import markdown_table, prose
from pocket_moe.card.tables import run_rows, tried_rows


def training_section(facts: Facts) -> str:
    moe, text = facts.moe, facts.text
    held = text["tokens"]["train"]
    how = prose(
        "AdamW on packed documents, with float32 masters; the experts run forward and backward through this",
        "repository's own kernels, and no token is dropped. The routers' balance loss ends at",
        f"{moe.balance:.3f}, where 1 is even; in a batch the busiest expert of a layer has {moe.peak:.2f} times the",
        "mean load.",
    )
    units = prose(
        "tokens/s is a median, minutes are of all steps. Losses are in nats per token, the held-out one over a part of",
        "that split.",
    )
    rows = run_rows({"this model": moe, "dense rival": facts.dense})
    curves = "![loss curves](plots/loss.svg)\n"
    return f"## Training\n\n{how}\n{_overfit(facts, held)}\n{markdown_table(rows)}\n{units}\n{_recipe(facts)}{curves}"


def _overfit(facts: Facts, held: int) -> str:
    moe = facts.moe
    return prose(
        f"The text limits this model: it has {held:,} tokens in {facts.text['documents']['train']:,} documents, and",
        f"training read {moe.tokens / max(1, held):.1f} times as many. The model overfits: the last training loss",
        f"is {moe.heldout - moe.loss:.2f} nats below the held-out one, partly because training reads the easy",
        "dictionary more often.",
        *_longer(facts.tried.get("moe", []), moe),
    )


def _longer(tried: list[Mapping[str, Any]], run: Training) -> list[str]:
    """What more steps gave; nothing if no shorter run of the same regularisation was noted."""
    shipped = next((row for row in tried if _is_of(row, run)), None)
    same = ("dropout", "weight_decay", "dictionary")
    shorter = [row for row in tried if shipped and row["steps"] < run.steps and all(row[k] == shipped[k] for k in same)]
    if not shorter:
        return []
    best = min(shorter, key=lambda row: float(row["heldout"]))
    return [
        f"More training helps little: {run.steps:,} steps in place of {best['steps']:,} gained",
        f"{best['heldout'] - run.heldout:.3f} nats.",
    ]


def _recipe(facts: Facts) -> str:
    if not facts.tried:
        return ""
    text = prose(
        "Dropout and weight decay are those of the run below with the lowest held-out loss, over part of the held-out",
        "split, which flatters both perplexities a little; the rest of the recipe was settled on another draw of",
        "held-out documents. The dictionary's column is how often an epoch reads it.",
    )
    return f"{text}\n{markdown_table(tried_rows(facts.tried))}\n"


def unexplained(facts: Facts) -> list[str]:
    """What is wrong with the list of tried runs: each shipped run has to be in it, as the best of its kind."""
    runs = {"moe": facts.moe, "dense": facts.dense}
    return [words for kind, run in runs.items() if facts.tried for words in _unexplained(kind, run, facts.tried)]


def _unexplained(kind: str, run: Training, tried: Mapping[str, Any]) -> list[str]:
    rows = tried.get(kind, [])
    if not any(_is_of(row, run) for row in rows):
        return [f"tried.json lacks the {kind} run of {run.steps} steps that ended at {run.heldout:.4f}"]
    best = min(float(row["heldout"]) for row in rows)
    if best < round(run.heldout, 4):
        return [f"tried.json has a better {kind} run, of {best:.4f}, than the shipped one of {run.heldout:.4f}"]
    return []


def _is_of(row: Mapping[str, Any], run: Training) -> bool:
    return bool(row["steps"] == run.steps and row["heldout"] == round(run.heldout, 4))
