"""Log-probabilities of tokens under the model's own distribution.

Legend: R rows, V vocabulary, W alternatives listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.messages import PromptScores, TokenLogprob
from services.model.transfer import Mark, download, upload


class TokenScores:
    """Scores of one token in each row of ``logits_RV``, on their way from the device.

    Args:
        tokens_R: int64, on the device of the logits.
        alternatives: how many of the likeliest tokens each row lists in addition to its own.
    """

    def __init__(self, logits_RV: Tensor, tokens_R: Tensor, alternatives: Sequence[int]) -> None:
        self._device = logits_RV.device
        logprobs_RV = logits_RV.log_softmax(dim=-1)
        self._chosen_R = download(logprobs_RV.gather(1, tokens_R[:, None])[:, 0])
        # Each width by itself: which of several equal tokens is listed must not depend on what other rows ask for.
        self._tops = [
            _Likeliest(logprobs_RV, [row for row, asked in enumerate(alternatives) if asked == width], width)
            for width in sorted(set(alternatives) - {0})
        ]

    def wait(self) -> TokenScores:
        """Wait until the scores are on the host."""
        Mark(self._device).wait()
        return self

    def table(self) -> ScoreTable:
        """Return scores of all rows, which must ask for equally many alternatives. Only once they are on the host."""
        likeliest = self._tops[0].sorted() if self._tops else None
        return ScoreTable(self._chosen_R.numpy().astype("<f4"), *(likeliest or _no_alternatives(len(self._chosen_R))))

    def read(self) -> list[TokenLogprob]:
        """Return the scores row by row, likeliest alternatives first. Only once they are on the host."""
        tops: dict[int, list[tuple[int, float]]] = {}
        for of_width in self._tops:
            tops |= of_width.read()
        return [TokenLogprob(logprob, tops.get(row, [])) for row, logprob in enumerate(self._chosen_R.tolist())]


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Scores of R tokens on the host, each with W alternatives: likeliest first, of equals the lower id first."""

    logprobs_R: NDArray[np.float32]
    top_ids_RW: NDArray[np.int32]
    top_logprobs_RW: NDArray[np.float32]

    def part(self, rows: slice) -> ScoreTable:
        return ScoreTable(self.logprobs_R[rows], self.top_ids_RW[rows], self.top_logprobs_RW[rows])

    @property
    def broken(self) -> bool:
        return bool(np.isnan(self.logprobs_R).any())

    def message(self, start: int) -> PromptScores:
        """Return the scores as a message, for a prompt's tokens from ``start`` on."""
        return PromptScores(
            start=start,
            width=self.top_ids_RW.shape[1],
            logprobs=self.logprobs_R.tobytes(),
            top_ids=self.top_ids_RW.tobytes(),
            top_logprobs=self.top_logprobs_RW.tobytes(),
        )


def joined(tables: Sequence[ScoreTable]) -> ScoreTable:
    """Concatenate ``tables``, which have one width."""
    return ScoreTable(
        np.concatenate([table.logprobs_R for table in tables]),
        np.concatenate([table.top_ids_RW for table in tables]),
        np.concatenate([table.top_logprobs_RW for table in tables]),
    )


def _no_alternatives(rows: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.empty((rows, 0), "<i4"), np.empty((rows, 0), "<f4")


class _Likeliest:
    """The ``width`` likeliest tokens of some ``rows``."""

    def __init__(self, logprobs_RV: Tensor, rows: Sequence[int], width: int) -> None:
        self._rows = rows
        index_R = upload(np.array(rows), logprobs_RV.device)
        values_RW, ids_RW = logprobs_RV[index_R].topk(min(width, logprobs_RV.shape[1]), dim=-1)
        self._values_RW, self._ids_RW = download(values_RW), download(ids_RW)

    def sorted(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids_RW, values_RW = self._ids_RW.numpy().astype("<i4"), self._values_RW.numpy().astype("<f4")
        order_RW = np.lexsort((ids_RW, -values_RW), axis=-1)
        return np.take_along_axis(ids_RW, order_RW, -1), np.take_along_axis(values_RW, order_RW, -1)

    def read(self) -> dict[int, list[tuple[int, float]]]:
        pairs = zip(self._ids_RW.tolist(), self._values_RW.tolist(), strict=True)
        ordered = (sorted(zip(*pair, strict=True), key=lambda entry: (-entry[1], entry[0])) for pair in pairs)
        return dict(zip(self._rows, ordered, strict=True))
