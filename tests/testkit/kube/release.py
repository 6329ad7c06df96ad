"""An installed release: how long its parts took, how to ask it, how it fares while something is done to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx2  # what the openai client is made on
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from testkit.kube.chart import NAME as NAME
from testkit.kube.cluster import Cluster
from testkit.pocket.answers import MAX_TOKENS, recorded
from testkit.waiting import eventually

PREFIX = f"{NAME}-expertmesh"
ROLE = "app.kubernetes.io/component"
PYTHON = "/opt/expertmesh/bin/python"
"""Path of Python in the images."""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"
REST_S = 10.0
"""How long the resting client leaves its connection idle between two requests; it keeps it for much longer."""
WAIT = ("--wait", "--timeout", "10m")
RETRY_TIMEOUT_S = 180.0
"""How long a client tries to have one request answered."""


@dataclass(kw_only=True)
class Outcome:
    """What clients met under load. ``failed``: errors that reached them; ``wrong``: texts other than recorded;
    ``refused`` and ``resumed``: what a :class:`Manner` made good."""

    finished: int = 0
    refused: int = 0
    resumed: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    longest_gap_s: float = 0.0
    """Longest time between two chunks of one stream, or before the first."""
    gap_at_s: float = 0.0
    """End of that gap, after the load began."""

    def note_gap(self, since: float, now: float) -> None:
        if now - since > self.longest_gap_s:
            self.longest_gap_s, self.gap_at_s = now - since, now - self.began

    def __str__(self) -> str:
        made_good = f", {self.refused} refused, {self.resumed} taken up" if self.refused or self.resumed else ""
        gap = f"longest gap {self.longest_gap_s:.1f} s at {self.gap_at_s:.0f} s"
        return f"{self.finished} finished{made_good}, {gap}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """What clients do by themselves, as any client can: a request that a 503 asks to send again is sent again
    (``comes_back``), and one whose connection breaks is taken up under its Idempotency-Key (``takes_up``)."""

    comes_back: bool = False
    takes_up: bool = False
    silence_s: float = 300.0
    """Time without a byte after which a connection counts as broken. A gateway sends something every 15 s once an
    answer has begun."""


PLAIN = Manner()
COMES_BACK = Manner(comes_back=True)
TAKES_UP = Manner(comes_back=True, takes_up=True, silence_s=20.0)


def is_leaving(pod: dict[str, Any]) -> bool:
    """Whether the pod is ending. Helm's --wait does not wait for such pods, which may still have streams."""
    return "deletionTimestamp" in pod["metadata"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The release ``name`` in ``namespace``. ``service``: what its clients ask; ``keys``: the Secret with their key."""

    cluster: Cluster
    namespace: str
    name: str = NAME
    service: str = f"{PREFIX}-gateway"
    keys: str = f"{PREFIX}-api-keys"

    @property
    def url(self) -> str:
        """The gateways' Service, which this machine reaches."""
        address = self.cluster.get(self.namespace, "service", self.service)["spec"]["clusterIP"]
        return f"http://{address}:8000"

    @property
    def key(self) -> str:
        return self.cluster.secret(self.namespace, self.keys, "api-key")

    def helm(self, *words: str, check: bool = True) -> str:
        return self.cluster.helm(*words, "--namespace", self.namespace, check=check)

    def apply(self, action: str, *settings: str, words: Sequence[str] = WAIT, check: bool = True) -> str:
        """``helm install`` or ``helm upgrade`` with profile dev and the images that were built here."""
        return self.helm(action, self.name, *self.cluster.chart("dev", *settings), *words, check=check)

    def kubectl(self, *words: str, text: str | None = None, check: bool = True) -> str:
        return self.cluster.kubectl("-n", self.namespace, *words, text=text, check=check)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=120, max_retries=0)

    def answers_as_recorded(self, count: int) -> None:
        client = self.client()
        for record in recorded()[:count]:
            answer = client.completions.create(
                model="pocket", prompt=record["prompt"], max_tokens=MAX_TOKENS, temperature=0
            )
            assert answer.choices[0].text == record["text"]

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        selector = f"app.kubernetes.io/instance={self.name}" + (f",{ROLE}={role}" if role else "")
        return self.cluster.items(self.namespace, "pods", "-l", selector)

    def uids(self, role: str | None = None) -> set[str]:
        """Of its pods."""
        return {pod["metadata"]["uid"] for pod in self.pods(role)}

    def whole(self, count: int, role: str | None = None) -> bool:
        """Whether there are so many pods, all ready, and none that is about to end."""
        pods = self.pods(role)
        conditions = [each for pod in pods for each in pod["status"].get("conditions", []) if each["type"] == "Ready"]
        ready = [each["status"] for each in conditions] == ["True"] * count
        return ready and len(pods) == count and not any(map(is_leaving, pods))

    def python(self, pod: str, script: str, *words: str, check: bool = True) -> str:
        """What ``script`` says, run in the pod; where it may fail (``check`` False) its errors too."""
        return self.kubectl("exec", pod, "--", PYTHON, "-c", script, *words, check=check)

    def reaches(self, pod: str, address: str, port: int) -> bool:
        """Whether a connection from there is made."""
        said = self.python(pod, CONNECT, address, str(port), check=False)
        assert not said or "timed out" in said or "refused" in said, said
        return not said

    def ready_after(self, began: float) -> dict[str, float]:
        """Seconds from ``began`` (Unix time) to each pod's readiness, to the second, as Kubernetes notes it."""
        times = {}
        for pod in self.pods():
            [ready] = [each for each in pod["status"]["conditions"] if each["type"] == "Ready"]
            if ready["status"] == "True":
                moment = datetime.fromisoformat(ready["lastTransitionTime"]).timestamp()
                times[pod["metadata"]["name"]] = max(0.0, moment - began)
        return times

    async def under_load(
        self,
        disturb: Callable[[], object],
        clients: int = 4,
        manner: Manner = PLAIN,
        lead_s: float = 0.0,
        least: int = 0,
    ) -> Outcome:
        """Recorded prompts, streamed by ``clients`` at a time until ``disturb`` has returned, and to their ends; it
        begins ``lead_s`` after them. They go on until ``least`` requests have finished or one has failed. One more
        client, with a connection of its own, rests between its requests. Nothing may fail that ``manner`` does not make
        good, and no answer differ."""
        outcome, over, records = Outcome(), asyncio.Event(), recorded()
        async with self._client(manner) as busy, self._client(manner) as resting:
            users = [_User(busy, records[number::clients], over, outcome, manner) for number in range(clients)]
            users.append(_User(resting, records, over, outcome, manner, rest_s=REST_S))
            tasks = [asyncio.create_task(user.ask_on()) for user in users]
            await asyncio.sleep(lead_s)
            try:
                await asyncio.to_thread(disturb)
                await eventually(lambda: outcome.finished >= least or outcome.failed, f"{least} finished", limit_s=300)
            finally:
                over.set()
                await asyncio.gather(*tasks)
        assert (outcome.failed, outcome.wrong) == ([], []), str(outcome)
        return outcome

    def _client(self, manner: Manner) -> AsyncOpenAI:
        pool = httpx2.Limits(keepalive_expiry=10 * REST_S)
        http = DefaultAsyncHttpxClient(limits=pool)
        silence = httpx2.Timeout(300, read=manner.silence_s)
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, timeout=silence, max_retries=0, http_client=http
        )


@dataclass(slots=True)
class _User:
    """Asks one recorded prompt after the other."""

    openai: AsyncOpenAI
    records: list[dict[str, Any]]
    over: asyncio.Event
    outcome: Outcome
    manner: Manner
    rest_s: float = 0.0

    async def ask_on(self) -> None:
        for record in itertools.cycle(self.records):
            if self.over.is_set():
                return
            await self._ask(record)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rest_s):
                    await self.over.wait()

    async def _ask(self, record: dict[str, Any]) -> None:
        try:
            text = await self._answer(record["prompt"])
        except Exception as error:  # noqa: BLE001  whatever reaches the client is what is counted
            moment = time.monotonic() - self.outcome.began
            self.outcome.failed.append(f"{record['id']} at {moment:.0f} s: {error!r} ({error.__cause__!r})")
            return
        self.outcome.finished += 1
        if text != record["text"]:
            self.outcome.wrong.append(f"{record['id']}: {text!r}")

    async def _answer(self, prompt: str) -> str:
        """The text of the one stream that came to its end. Those that broke must have begun as it does."""
        key, parts, deadline = uuid.uuid4().hex, [], time.monotonic() + RETRY_TIMEOUT_S
        while True:
            parts.append("")
            try:
                async for piece in self._stream(prompt, key):
                    parts[-1] += piece
                break
            except (APIStatusError, APIConnectionError, httpx2.TransportError) as error:
                if time.monotonic() > deadline or not self._made_good(error):
                    raise
                await asyncio.sleep(_retry_after(error))
        assert all(parts[-1].startswith(part) for part in parts), parts
        return parts[-1]

    def _made_good(self, error: Exception) -> bool:
        if isinstance(error, APIStatusError):
            self.outcome.refused += 1
            return self.manner.comes_back and error.status_code == 503
        self.outcome.resumed += 1
        return self.manner.takes_up

    async def _stream(self, prompt: str, key: str) -> AsyncIterator[str]:
        last = time.monotonic()
        stream = await self.openai.completions.create(
            model="pocket",
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_headers={"Idempotency-Key": key} if self.manner.takes_up else None,
        )
        async for chunk in stream:
            self.outcome.note_gap(last, last := time.monotonic())
            yield chunk.choices[0].text


def _retry_after(error: Exception) -> float:
    """Seconds that the server asks for, where it could say so."""
    response = error.response if isinstance(error, APIStatusError) else None
    return min(float(response.headers.get("retry-after", 1)), 5.0) if response is not None else 0.5
