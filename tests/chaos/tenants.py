"""Clients of several tenants, each with a key of its own, that send one request after the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from testkit.processes.background import ended

from loadgen.client import stream_completion
from loadgen.connections import Broken, Session, TimedOut
from services.gateway.auth import digest

_PAUSE_S = 0.5
Bounds = tuple[int, int]


def key_file(path: Path, tenants: Mapping[str, str]) -> Path:
    """Writes the gateway's file of API keys; ``tenants``: a key for each tenant's name."""
    keys = [{"name": name, "sha256": digest(key)} for name, key in tenants.items()]
    path.write_text(yaml.safe_dump({"keys": keys}))
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """Sends to the server at ``url``. No two of its prompts share a cached prefix."""

    url: str
    key: str
    seed: int
    model: str = "pocket"

    @contextlib.asynccontextmanager
    async def sending(
        self, *, streams: int, prompt_tokens: Bounds, output_tokens: Bounds, tokens: Sequence[int] = range(10, 1000)
    ) -> AsyncIterator[None]:
        """``streams`` clients at once for as long as the block runs. Prompts repeat one of ``tokens`` where these are
        few, else they are random."""
        rng, count = random.Random(self.seed), itertools.count()

        def body() -> dict[str, Any]:
            length = rng.randint(*prompt_tokens)
            few = len(tokens) < 10
            prompt = [rng.choice(tokens)] * length if few else rng.choices(tokens, k=length)
            return self._body(prompt, rng.randint(*output_tokens), f"{self.seed}-{next(count)}")

        async with Session() as session:
            clients = [asyncio.create_task(self._client(session, body)) for _ in range(streams)]
            try:
                yield
            finally:
                await ended(clients)

    def send_once(self, prompt: Sequence[int], output_tokens: int) -> None:
        """Returns when the answer has come."""
        body = self._body(list(prompt), output_tokens, f"once-{self.seed}-{prompt[0]}")
        httpx.post(f"{self.url}/v1/completions", json=body, headers=self._headers, timeout=120).raise_for_status()

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def _body(self, prompt: list[int], output_tokens: int, salt: str) -> dict[str, Any]:
        asked = {"model": self.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
        return asked | {"ignore_eos": True, "cache_salt": salt}

    async def _client(self, session: Session, body: Callable[[], dict[str, Any]]) -> None:
        while True:
            with contextlib.suppress(Broken, TimedOut):
                result = await stream_completion(session, self.url, body(), headers=self._headers)
                if result.status == 200:
                    continue
            await asyncio.sleep(_PAUSE_S)
