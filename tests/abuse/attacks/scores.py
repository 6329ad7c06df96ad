"""H2, H5: answers that are a thousand times their question. What is counted is values: n times prompt times
alternatives."""

from __future__ import annotations

import asyncio
from typing import Any

from abuse.attack import Attack, Bounds, Target
from abuse.kit.tokens import BABBLE, BURST, HOLD

_ECHOED = {"n": 128, "echo": True, "logprobs": 20, "max_tokens": 1}


async def echoed(target: Target) -> None:
    """5 KB in, 49 MB out."""
    await target.post("/v1/completions", {"prompt": [100] * 1000, **_ECHOED})


async def echoed_stream(target: Target) -> None:
    await target.post("/v1/completions", {"prompt": [100] * 1000, "stream": True, **_ECHOED})


async def echoed_prompts(target: Target) -> None:
    """The same by many prompts."""
    prompts = [[100 + i] * 1000 for i in range(128)]
    await target.post("/v1/completions", {"prompt": prompts, **_ECHOED, "n": 1})


async def echoed_long(target: Target) -> None:
    """32,000 tokens: everything is linear in the context."""
    await target.post("/v1/completions", {"prompt": [100] * 32_000, **_ECHOED})


async def echoed_once(target: Target) -> None:
    """One choice of a long prompt: as many values as one request may reasonably ask for, and many such requests."""
    body = {"prompt": [100] * 60_000, **_ECHOED, "n": 1}
    await target.post("/v1/completions", body)
    await asyncio.gather(*(target.post("/v1/completions", body) for _ in range(4)))


async def echoed_often(target: Target) -> None:
    """Each within any bound on a request, 40 at once."""
    body = {"prompt": [100] * 1000, **_ECHOED, "n": 16}
    await asyncio.gather(*(target.post("/v1/completions", body) for _ in range(40)))


async def chat_choices(target: Target) -> None:
    """128 choices with 20 alternatives each, streamed and whole, for 12 seconds."""
    ask = {"messages": [{"role": "user", "content": "hi"}], "n": 128, "logprobs": True, "top_logprobs": 20}
    ask |= {"max_tokens": 120, "ignore_eos": True}
    await asyncio.gather(
        target.post("/v1/chat/completions", ask), target.post("/v1/chat/completions", ask | {"stream": True})
    )


async def fast_choices(target: Target) -> None:
    """As fast as the worker can: 32 tokens a step of 16 choices, each with its alternatives and ids."""
    body = {"prompt": [BURST, *[100] * 20], "n": 16, "logprobs": 20, "max_tokens": 640, "ignore_eos": True}
    await asyncio.gather(
        target.post("/v1/completions", body | {"stream": True, "return_token_ids": True}),
        target.post("/v1/completions", body),
    )


async def keyed(target: Target) -> None:
    """Twelve finished jobs with an Idempotency-Key each: what is kept of them for whoever comes again."""
    for number in range(12):
        body = {"prompt": [100] * 1000, **_ECHOED, "n": 16, "seed": number}
        await target.post("/v1/completions", body, headers={"Idempotency-Key": f"kept-{number}-{id(target)}"})


async def keyed_long(target: Target) -> None:
    """Plain text this time: 48 answers of 128 choices."""

    async def one(number: int) -> None:
        body = {"prompt": [BURST, *[100] * 200], "n": 128, "max_tokens": 64, "seed": number, "ignore_eos": True}
        await target.post("/v1/completions", body, headers={"Idempotency-Key": f"long-{number}-{id(target)}"})

    for start in range(0, 48, 8):
        await asyncio.gather(*(one(number) for number in range(start, start + 8)))


async def attached(target: Target) -> None:
    """2,000 clients come for the answer of one key, once while it is made and once after."""
    body: dict[str, Any] = {"prompt": [100] * 40, "n": 8, "logprobs": 20, "max_tokens": 30, "ignore_eos": True}
    headers = {"Idempotency-Key": f"attached-{id(target)}"}
    places = asyncio.Semaphore(500)

    async def one(stream: bool) -> None:
        async with places:
            await target.post("/v1/completions", body | {"stream": stream}, headers=headers)

    body |= {"seed": 1}
    await asyncio.gather(*(one(True) for _ in range(1000)))
    await asyncio.gather(*(one(True) for _ in range(1000)))


async def stop_strings(target: Target) -> None:
    """Stop strings that the answer almost spells, for 128 choices: as many and as long as may be, and more."""
    token = target.tokens_of("a")[0]
    for count, length in ((64, 1023), (16, 240), (4, 1000)):
        stops = ["a" * (length - i) + "b" * (i + 1) for i in range(count)]
        body = {"prompt": [BABBLE, token], "n": 128, "stop": stops, "max_tokens": 60, "ignore_eos": True}
        await target.post("/v1/completions", body)
    stops = ["a" * (170 + 8 * i) + "b" for i in range(16)]
    burst = {"prompt": [BURST, 300], "n": 64, "stop": stops, "max_tokens": 320, "ignore_eos": True}
    await target.post("/v1/completions", burst)


async def echoes(target: Target) -> None:
    """720,000 tokens of text, echoed, whole and under keys."""
    word = target.tokens_of(" information")[0]
    body = {"prompt": [[word] * 40_000 for _ in range(18)], "echo": True, "max_tokens": 1}
    for number in range(4):
        headers = {"Idempotency-Key": f"echo-{number}-{id(target)}"}
        await target.post("/v1/completions", body | {"seed": number}, headers=headers)


async def biases(target: Target) -> None:
    """1,024 biases for each of 128 choices, 16 times: what is kept for each choice adds up."""
    bias = {str(token): 1.0 for token in range(1024)}
    body = {"prompt": [HOLD, 5], "n": 128, "logit_bias": bias, "max_tokens": 4, "stop_token_ids": list(range(128))}

    async def leave(number: int) -> None:
        dialer = target.dialer()
        target.answers.note(await dialer.post("/v1/completions", body | {"seed": number}, timeout_s=6))

    await asyncio.gather(*(leave(number) for number in range(16)))


def _wide(served: int) -> Bounds:
    return Bounds(peak=600, within=90, served=served)


_KEPT = Bounds(peak=600, kept=150, within=90, served=4)
ATTACKS = [
    Attack(name="scores: n=128, echo, 20 each", finding="H2", run=echoed, bounds=_wide(1)),
    Attack(name="scores: the same, streamed", finding="H2", run=echoed_stream, bounds=_wide(1)),
    Attack(name="scores: of 128 prompts", finding="H2", run=echoed_prompts, bounds=_wide(1)),
    Attack(name="scores: of 32,000 tokens", finding="H2", run=echoed_long, bounds=_wide(0)),
    Attack(name="scores: one choice, 60,000 tokens", finding="H2", run=echoed_once, bounds=_wide(2)),
    Attack(name="scores: 40 requests at once", finding="H2", run=echoed_often, bounds=_wide(10)),
    Attack(name="scores: chat, 128 choices", finding="H2", run=chat_choices, bounds=_wide(2)),
    Attack(name="scores: as fast as can be", finding="own", run=fast_choices, bounds=_wide(2)),
    Attack(name="kept: 12 answers with scores", finding="H5", run=keyed, bounds=_KEPT),
    Attack(name="kept: 48 long answers", finding="H5", run=keyed_long, bounds=_KEPT),
    Attack(name="kept: 2,000 clients for one key", finding="own", run=attached, bounds=_wide(1)),
    Attack(name="stop strings: almost met", finding="own", run=stop_strings, bounds=_wide(3)),
    # Others' first tokens wait for its prompts on the one worker.
    Attack(
        name="echoes: 720,000 tokens",
        finding="own",
        run=echoes,
        bounds=Bounds(peak=600, kept=150, within=90, first=20),
    ),
    Attack(
        name="biases: 16 times 128 choices",
        finding="own",
        run=biases,
        bounds=Bounds(peak=600, redis_peak=300, also=("silence",)),
    ),
]
