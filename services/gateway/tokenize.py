"""``/tokenize`` and ``/detokenize``: the checkpoint's tokenizer, within the bounds of prompts.

In: typed bodies. Out: the answers as JSON; long answers are encoded in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.errors import ContextLengthExceeded, InvalidRequest
from services.gateway.offload import Offload
from services.gateway.prompts import PromptReader
from services.gateway.schema import DetokenizeBody, TokenizeBody

_INLINE_TOKENS = 1024


class TokenizerRoutes:
    """Answers the bodies of the two routes."""

    def __init__(self, prompts: PromptReader, offload: Offload) -> None:
        self._prompts = prompts
        self._offload = offload

    async def tokenize(self, body: TokenizeBody, tenant: str) -> bytes:
        """Returns the token ids. Raises ContextLengthExceeded for a text that takes long to tokenize and cannot fit."""
        self._prompts.check_model(body.model)
        token_ids = await self._token_ids(body, tenant)
        codec, named = self._prompts.model.codec, body.return_token_strs
        return await self._encoded(
            lambda: {
                "count": len(token_ids),
                "max_model_len": self._prompts.max_model_len,
                "tokens": list(token_ids),
                "token_strs": [codec.token_text(token_id) for token_id in token_ids] if named else None,
            },
            len(token_ids),
            tenant,
        )

    async def detokenize(self, body: DetokenizeBody, tenant: str) -> bytes:
        """Returns the text. Raises ContextLengthExceeded for more tokens than the model's context holds."""
        model = self._prompts.model
        self._prompts.check_model(body.model)
        if len(body.tokens) > model.max_len:
            raise ContextLengthExceeded(
                f"There are {len(body.tokens)} tokens; the context holds {model.max_len}.",
                hint="Send fewer.",
                param="tokens",
            )
        self._prompts.check_ids(body.tokens, "tokens")
        return await self._encoded(lambda: {"prompt": model.codec.decode(body.tokens)}, len(body.tokens), tenant)

    async def _token_ids(self, body: TokenizeBody, tenant: str) -> Sequence[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Exactly one of prompt and messages is needed.", hint="Leave one out.", param="prompt")
        if body.messages is not None:
            prompt = await self._prompts.of_messages(
                body.messages, body.add_generation_prompt, None, body.parse_special_tokens, tenant
            )
            return prompt.token_ids.tolist()
        return await self._prompts.encode(
            body.prompt or "", tenant, add_special_tokens=body.add_special_tokens is not False
        )

    async def _encoded(self, build: Callable[[], dict[str, Any]], tokens: int, tenant: str) -> bytes:
        def encode() -> bytes:
            return msgspec.json.encode(build())

        return encode() if tokens <= _INLINE_TOKENS else await self._offload.run(tenant, encode, owed=True)
