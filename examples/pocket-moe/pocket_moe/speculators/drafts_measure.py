"""A target, its speculators and held-out text in, their acceptance by domain out.

Legend: S speculators, B rows, L positions, N positions with a label, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pocket_moe.corpus.shards import Shards
from pocket_moe.model.losses import NO_TARGET
from pocket_moe.model.model import PocketMoe
from pocket_moe.speculators.boost_rows import LabelledRows, Written, best_tokens, continuations, label, pack_documents
from pocket_moe.speculators.drafts import BRANCHES, Tally, hits
from pocket_moe.speculators.drafts_runs import DEPTH, runs


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceSettings:
    """``own_prompts`` documents per domain are continued by the target itself, as ``written`` says."""

    rows: int = 32
    own_prompts: int = 200
    written: Written = field(default_factory=Written)


def acceptance(
    target: PocketMoe, speculators: Sequence[PocketMoe], shards: Shards, settings: AcceptanceSettings
) -> dict[str, Any]:
    """For ``acceptance.json``: on the held-out text ("teacher_forcing"), and on what the target itself writes after
    the beginnings of held-out documents ("own_output"), as it is when the target is served; there also how many tokens
    of ``depth`` are right in a row."""
    text, own, in_a_row = Tally(), Tally(), Tally()
    for index, domain in enumerate(shards.meta.domains):
        documents = np.flatnonzero(shards.domain == index)
        if len(documents):
            packed = pack_documents(shards, documents, settings.written.length, pad_id=target.config.pad_token_id)
            tally(text, domain, label(target, packed, batch_rows=settings.rows), speculators, settings.rows)
            begun = documents[: settings.own_prompts]
            written = continuations(target, shards, begun, settings.written, batch_rows=8 * settings.rows)
            tally(own, domain, written, speculators, settings.rows, in_a_row)
    output = own.record() | {"runs": in_a_row.record()}
    return {"branches": list(BRANCHES), "depth": DEPTH, "teacher_forcing": text.record(), "own_output": output}


def tally(
    result: Tally,
    domain: str,
    rows: LabelledRows,
    speculators: Sequence[PocketMoe],
    batch_rows: int,
    in_a_row: Tally | None = None,
) -> None:
    """Adds hits to ``result``, and to ``in_a_row`` their runs, which the target's own output alone has."""
    for part, tokens_BL, positions_BL in rows.chunks(batch_rows):
        labels_N, known_BL = _known(rows.labels_RL[part])
        candidates = [best_tokens(model, tokens_BL, positions_BL, max(BRANCHES))[known_BL] for model in speculators]
        found = hits(torch.stack(candidates), labels_N)
        result.add(domain, found)
        if in_a_row is not None:
            in_a_row.add(domain, runs(found, known_BL))


def _known(labels_BL: Tensor) -> tuple[Tensor, Tensor]:
    known_BL = labels_BL != NO_TARGET
    return labels_BL[known_BL].long(), known_BL
