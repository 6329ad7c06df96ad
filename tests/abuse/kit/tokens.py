"""What the stand-in worker answers: a function of the prompt and the index alone, so that each client can verify it.

A prompt whose first token is one of those below asks for something else.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from services.gateway.tokenizer import TextCodec, load_codec, read_tokenizer_config

HOLD = 8188
"""No token ever: the request is held until it is cancelled."""
POISON = 8189
"""The worker dies, a second after it began with the prompt."""
BABBLE = 8190
"""The prompt's second token, again and again."""
BURST = 8191
"""As any other, but :data:`BURST_TOKENS` in each step; of those beyond the first, :data:`BURSTS` in all."""
BURST_TOKENS = 32
BURSTS = 4096
"""In one step: about what an engine makes with all seats taken and three drafts a step."""


class Answers:
    """The answers of one tokenizer: words in plain letters, each a token."""

    def __init__(self, codec: TextCodec, vocabulary: int) -> None:
        texts = ((token, codec.token_text(token)) for token in range(4, vocabulary - 4))
        self._words = [(token, text) for token, text in texts if text.strip().isascii() and text.strip().isalpha()]

    @classmethod
    def of(cls, model: Path, vocabulary: int = 8192) -> Answers:
        return cls(load_codec(model, read_tokenizer_config(model)), vocabulary)

    def key(self, prompt: Sequence[int]) -> int:
        """What :meth:`token` needs to know of a prompt."""
        return zlib.crc32(array("q", prompt).tobytes())

    def token(self, key: int, index: int) -> int:
        return self._word(key, index)[0]

    def text(self, key: int, index: int) -> str:
        return self._word(key, index)[1]

    def _word(self, key: int, index: int) -> tuple[int, str]:
        return self._words[(key + index * 2654435761) % len(self._words)]
