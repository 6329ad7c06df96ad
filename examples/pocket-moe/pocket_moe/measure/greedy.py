"""Prompts in, the reference's greedy answers out, with how clear each choice was on the way.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pocket_moe.errors import PocketError
from pocket_moe.measure.samples import Prompt, Sample
from pocket_moe.records import Greedy
from services.model.reference import ReferenceModel

LOGIT_MARGIN: Final = 1e-4
ROUTER_MARGIN: Final = 1e-5
"""An answer with a closer choice than these is not kept: float32 in another order may decide otherwise."""

Step = Callable[[Sequence[int]], tuple[Tensor, float]]
"""Tokens in; the logits ``[V]`` of the next one, and the smallest router margin over the tokens, out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """``ids`` hold the end token if it came. ``router_margin`` is in probability, ``margin`` in logits."""

    ids: tuple[int, ...]
    margin: float
    router_margin: float

    @property
    def clear(self) -> bool:
        return self.margin >= LOGIT_MARGIN and self.router_margin >= ROUTER_MARGIN


def continue_greedily(step: Step, prompt_ids: Sequence[int], *, most: int, eos_id: int) -> Continuation:
    """Always the most likely token, until ``eos_id`` or ``most`` tokens."""
    ids = list(prompt_ids)
    margin = router_margin = math.inf
    for _ in range(most):
        logits_V, routed = step(ids)
        best = torch.topk(logits_V, 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        router_margin = min(router_margin, routed)
        ids.append(int(best.indices[0]))
        if ids[-1] == eos_id:
            break
    return Continuation(ids=tuple(ids[len(prompt_ids) :]), margin=margin, router_margin=router_margin)


class Answerer:
    """The oracle with its tokenizer: text in, greedy text out."""

    def __init__(self, folder: Path, *, most: int) -> None:
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._eos_id = int(json.loads((folder / "config.json").read_text())["eos_token_id"])
            self._model = ReferenceModel.load(folder)
        except Exception as error:
            # The tokenizer's library raises plain exceptions, the checkpoint's reader its own kind.
            raise PocketError(
                f"The model in {folder} cannot be read: {error}", hint="Pass an exported folder."
            ) from error
        self._most = most

    def answer(self, prompt: Prompt) -> tuple[Greedy, Continuation]:
        prompt_ids = tuple(self._tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        found = continue_greedily(self._step, prompt_ids, most=self._most, eos_id=self._eos_id)
        text = self._tokenizer.decode(list(found.ids), skip_special_tokens=True)
        greedy = Greedy(
            id=f"{prompt.kind}/{prompt.id}",
            domain=prompt.domain,
            prompt=prompt.text,
            prompt_ids=prompt_ids,
            output_ids=found.ids,
            text=text,
            margin=found.margin,
            router_margin=found.router_margin,
        )
        return greedy, found

    def sample(self, prompt: Prompt) -> Sample:
        greedy, found = self.answer(prompt)
        ended = found.ids[-1:] == (self._eos_id,)
        return Sample(kind=prompt.kind, prompt=prompt.text, written=greedy.text, expected=prompt.expected, ended=ended)

    def _step(self, ids: Sequence[int]) -> tuple[Tensor, float]:
        output = self._model.run(ids)
        return output.logits_TV[-1], float(output.router_margin_T.min())


def clear_answers(answerer: Answerer, prompts: Iterable[Prompt], wanted: int) -> Iterator[Greedy]:
    """The first ``wanted`` prompts whose answer no rounding can change."""
    kept = 0
    for prompt in prompts:
        if kept == wanted:
            return
        greedy, found = answerer.answer(prompt)
        if found.clear:
            kept += 1
            yield greedy
