"""How tokens are drafted, as `--speculative-config` says it, with vLLM's names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SPECULATIVE = (
    'JSON with "method": "ngram", and if wanted num_speculative_tokens, prompt_lookup_min and prompt_lookup_max, each '
    "from 1 to 16, the least no larger than the most, and num_branches from 1 to 8; or "
    '"method": "draft_model", "model": the folder of one with the same tokens, and if wanted num_speculative_tokens '
    "and num_branches, and the other two only beside branches"
)
"""What a value has to be, for messages."""


class SpeculativeConfig(BaseModel):
    """``num_speculative_tokens`` is the longest chain of drafts, ``num_branches`` how many of them make a tree at most;
    measured gain decides about shorter and fewer ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: int = Field(4, ge=1, le=16)
    num_branches: int = Field(1, ge=1, le=8)
    prompt_lookup_min: int | None = Field(None, ge=1, le=16)
    prompt_lookup_max: int | None = Field(None, ge=1, le=16)
    model: str | None = Field(None, min_length=1)
    """The folder of the model that drafts."""

    @property
    def folder(self) -> Path | None:
        """Where the model that drafts lies, if there is one."""
        return None if self.model is None else Path(self.model).expanduser()

    @property
    def shortest(self) -> int:
        """Least tokens at the end of a sequence that have to occur earlier in it."""
        return self.prompt_lookup_min or min(2, self.prompt_lookup_max or 2)

    @property
    def longest(self) -> int:
        """Most tokens that are compared: of several earlier places the one that agrees in most of them is taken."""
        return self.prompt_lookup_max or max(5, self.prompt_lookup_min or 5)

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.shortest > self.longest:
            raise ValueError("prompt_lookup_min is larger than prompt_lookup_max")
        return self

    @model_validator(mode="after")
    def _of_its_method(self) -> SpeculativeConfig:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError("a model is that of draft_model, which needs one")
        looks_up = self.method == "ngram" or self.num_branches > 1
        if not looks_up and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise ValueError(
                "prompt_lookup_min and prompt_lookup_max are of ngram, and of branches beside a draft model"
            )
        return self
