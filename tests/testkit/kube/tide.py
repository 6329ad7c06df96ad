"""A load that rises and falls: recorded prompts, streamed by as many clients as there should be at the moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from testkit.kube.release import Release
from testkit.pocket.answers import MAX_TOKENS, recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """A token: when it came (Unix time), and how long after the one before it."""

    at: float
    gap_s: float


@dataclass(kw_only=True)
class Tide:
    """``clients``: how many ask at the moment; ``rest_s``: each one's pause between two requests. ``failed`` are errors
    that reached them, ``wrong`` texts other than recorded."""

    release: Release
    clients: int = 0
    rest_s: float = 0.0
    finished: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    met: list[Met] = field(default_factory=list)

    @asynccontextmanager
    async def flowing(self, limit: int) -> AsyncIterator[Tide]:
        """Send requests until the end of the block, and wait for those that are under way then."""
        over, records, key = asyncio.Event(), recorded(), self.release.key
        async with AsyncOpenAI(base_url=f"{self.release.url}/v1", api_key=key, timeout=300, max_retries=0) as openai:
            clients = [asyncio.create_task(self._client(openai, number, records, over)) for number in range(limit)]
            try:
                yield self
            finally:
                over.set()
                await asyncio.gather(*clients)

    async def _client(
        self, openai: AsyncOpenAI, number: int, records: list[dict[str, Any]], over: asyncio.Event
    ) -> None:
        asked = number
        while not over.is_set():
            if number >= self.clients:
                await asyncio.sleep(0.2)
                continue
            record = records[asked % len(records)]
            asked += 7
            try:
                text = await self._streamed(openai, record["prompt"])
            except Exception as error:  # noqa: BLE001  whatever reaches the client is what is counted
                self.failed.append(f"{record['id']}: {error!r}")
                continue
            self.finished += 1
            if text != record["text"]:
                self.wrong.append(f"{record['id']}: {text!r}")
            await asyncio.sleep(self.rest_s)

    async def _streamed(self, openai: AsyncOpenAI, prompt: str) -> str:
        text, last = "", None
        stream = await openai.completions.create(
            model="pocket", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        async for chunk in stream:
            now = time.time()
            if last is not None:
                self.met.append(Met(at=now, gap_s=now - last))
            last = now
            text += chunk.choices[0].text
        return text

    def gap_s(self, share: float, began: float, ended: float) -> float:
        """So many of the gaps between tokens that came from ``began`` to ``ended``, Unix times, were no longer; s."""
        gaps = sorted(met.gap_s for met in self.met if began <= met.at < ended)
        assert len(gaps) >= 20, f"only {len(gaps)} tokens"
        return gaps[int(share * len(gaps))]
