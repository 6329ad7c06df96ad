"""Log-probabilities of tokens under the model's own distribution.

Legend: R rows, V vocabulary, W alternatives listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from services.messages import TokenLogprob
from services.model.transfer import Mark, download, upload


class TokenScores:
    """Scores of one token in each row of ``logits_RV``, on their way from the device.

    Args:
        tokens_R: int64, on the device of the logits.
        alternatives: how many of the likeliest tokens each row lists beside its own.
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
        """Until they are there."""
        Mark(self._device).wait()
        return self

    def read(self) -> list[TokenLogprob]:
        """Likeliest alternatives first. Only once the device has come past all this."""
        tops: dict[int, list[tuple[int, float]]] = {}
        for of_width in self._tops:
            tops |= of_width.read()
        return [TokenLogprob(logprob, tops.get(row, [])) for row, logprob in enumerate(self._chosen_R.tolist())]


class _Likeliest:
    """The ``width`` likeliest tokens of some ``rows``."""

    def __init__(self, logprobs_RV: Tensor, rows: Sequence[int], width: int) -> None:
        self._rows = rows
        index_R = upload(np.array(rows), logprobs_RV.device)
        values_RW, ids_RW = logprobs_RV[index_R].topk(min(width, logprobs_RV.shape[1]), dim=-1)
        self._values_RW, self._ids_RW = download(values_RW), download(ids_RW)

    def read(self) -> dict[int, list[tuple[int, float]]]:
        pairs = zip(self._ids_RW.tolist(), self._values_RW.tolist(), strict=True)
        ordered = (sorted(zip(*pair, strict=True), key=lambda entry: (-entry[1], entry[0])) for pair in pairs)
        return dict(zip(self._rows, ordered, strict=True))
