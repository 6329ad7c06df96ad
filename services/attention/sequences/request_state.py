"""What the sampler knows of one row's sequence. Made once per sequence, since a step has hundreds. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.attention.sequences.keys import sequence_key
from services.messages import SamplingParams


@dataclass(kw_only=True, slots=True, eq=False)
class DrawRow:
    """``token_ids`` are all tokens so far and grow with the sequence; ``stop_ids`` the tokens that may end it."""

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int
    stop_ids: frozenset[int] = frozenset()
    may_edit: bool = field(init=False)
    """Whether logits change before the temperature in any step."""
    looks_back: bool = field(init=False)
    """Whether they change by the tokens that came before."""
    samples: bool = field(init=False)
    """Whether it is drawn with a temperature."""
    filters: bool = field(init=False)
    """Whether that leaves tokens out."""
    key: int = field(init=False)
    """See :func:`services.attention.sequences.keys.sequence_key`."""
    narrow_heads: int = field(init=False, default=0)
    """Heads of the vocabulary that were too narrow for its filters; see :mod:`services.attention.sampling.filters`."""

    def __post_init__(self) -> None:
        params = self.params
        self.samples = params.temperature > 0
        self.filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.key = sequence_key(params.seed, params.choice)
        self.looks_back = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.may_edit = self.looks_back or bool(params.logit_bias) or (params.min_tokens > 0 and bool(self.stop_ids))

    def generated(self, ahead: int) -> int:
        """Tokens generated once ``ahead`` more are known than ``token_ids`` has."""
        return len(self.token_ids) + ahead - self.prompt_len

    def bans_stop(self, ahead: int) -> bool:
        return self.generated(ahead) < self.params.min_tokens and bool(self.stop_ids)
