"""An installed release: how long its parts took, how to ask it, how it fares while something is done to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from testkit.kube import Cluster
from testkit.pocket_answers import MOST_TOKENS, recorded

NAME = "mesh"
PREFIX = f"{NAME}-expertmesh"
ROLE = "app.kubernetes.io/component"
REST_S = 10.0
"""How long the resting client leaves its connection idle between two requests; it keeps it for much longer."""


@dataclass(kw_only=True)
class Outcome:
    """What clients met under load. ``failed``: errors that reached them; ``wrong``: texts other than recorded."""

    finished: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The release NAME in ``namespace``."""

    cluster: Cluster
    namespace: str

    @property
    def url(self) -> str:
        """The gateways' Service, which this machine reaches."""
        address = self.cluster.get(self.namespace, "service", f"{PREFIX}-gateway")["spec"]["clusterIP"]
        return f"http://{address}:8000"

    @property
    def key(self) -> str:
        return self.cluster.secret(self.namespace, f"{PREFIX}-api-keys", "api-key")

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=120, max_retries=0)

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        selector = f"app.kubernetes.io/instance={NAME}" + (f",{ROLE}={role}" if role else "")
        return self.cluster.items(self.namespace, "pods", "-l", selector)

    def ready_after(self, began: float) -> dict[str, float]:
        """Seconds from ``began`` (Unix time) to each pod's readiness, to the second, as Kubernetes notes it."""
        times = {}
        for pod in self.pods():
            [ready] = [each for each in pod["status"]["conditions"] if each["type"] == "Ready"]
            if ready["status"] == "True":
                moment = datetime.fromisoformat(ready["lastTransitionTime"]).timestamp()
                times[pod["metadata"]["name"]] = max(0.0, moment - began)
        return times

    async def under_load(self, disturb: Callable[[], object], clients: int = 4) -> Outcome:
        """Recorded prompts, streamed by ``clients`` at a time until ``disturb`` has returned, and to their ends. One
        more client, with a connection of its own, rests between its requests. None tries again what failed."""
        outcome, over, records = Outcome(), asyncio.Event(), recorded()
        async with self._patient() as busy, self._patient() as resting:
            tasks = [
                asyncio.create_task(_ask_on(busy, records[number::clients], over, outcome)) for number in range(clients)
            ]
            tasks.append(asyncio.create_task(_ask_on(resting, records, over, outcome, rest_s=REST_S)))
            await asyncio.to_thread(disturb)
            over.set()
            await asyncio.gather(*tasks)
        return outcome

    def _patient(self) -> AsyncOpenAI:
        pool = httpx.Limits(keepalive_expiry=10 * REST_S)
        http = DefaultAsyncHttpxClient(limits=pool)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=300, max_retries=0, http_client=http)


async def _ask_on(
    openai: AsyncOpenAI,
    records: list[dict[str, Any]],
    over: asyncio.Event,
    outcome: Outcome,
    rest_s: float = 0.0,
) -> None:
    number = 0
    while not over.is_set():
        record = records[number % len(records)]
        number += 1
        try:
            text = await _streamed(openai, record["prompt"], outcome)
        except Exception as error:  # noqa: BLE001  whatever reaches the client is what is counted
            outcome.failed.append(f"{record['id']}: {error!r}")
            continue
        outcome.finished += 1
        if text != record["text"]:
            outcome.wrong.append(f"{record['id']}: {text!r}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rest_s):
                await over.wait()


async def _streamed(openai: AsyncOpenAI, prompt: str, outcome: Outcome) -> str:
    text, last = "", time.monotonic()
    stream = await openai.completions.create(
        model="pocket", prompt=prompt, max_tokens=MOST_TOKENS, temperature=0, stream=True
    )
    async for chunk in stream:
        now = time.monotonic()
        outcome.longest_gap_s, last = max(outcome.longest_gap_s, now - last), now
        text += chunk.choices[0].text
    return text
