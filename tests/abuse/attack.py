"""An attack, its bounds, and the verdict on a run of it.

While it runs, and a moment after, honest clients and the watch note what they see; the bounds are on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import redis.asyncio

from abuse.kit.cage import MIB
from abuse.kit.stage import ATTACKER, Shape, Stage
from abuse.kit.wire import Answer, Answers, Dialer
from services.gateway.tokenizer import load_codec, read_tokenizer_config

QUIET_S = 1.5
_NICENESS = 10
"""Whoever attacks has machines of his own: what his work costs here must not look like the gateway's."""
_MIN_PROBES_PER_S = 2.0
_MAX_LAG = 0.1
"""The share of a run that a helper may itself have been late, which it takes off what it measures."""
_SERVED = ("200", "400", "401", "404", "405", "408", "409", "411", "413", "414", "415", "429", "431", "503")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Seconds and MiB. ``gap``: between two tokens of any honest stream; ``first``: from an honest request to its
    first token. ``peak``: the gateway's resident memory at its highest, ``kept``: what it may have more at the end than
    at the start; ``redis_kept``: the same of Redis' ``used_memory``. ``within``: the attack itself is over. ``also``:
    kinds of answers, besides errors with a type, that are in order. ``served``: so many of its requests at least get
    what they asked for, or it was not this attack that was withstood."""

    gap: float = 1.0
    first: float = 1.0
    health: float = 1.0
    ping: float = 0.5
    peak: float = 500.0
    kept: float = 250.0
    redis_peak: float = 600.0
    redis_kept: float = 16.0
    within: float = 60.0
    also: tuple[str, ...] = ()
    served: int = 0
    refusals: int = 0
    """How many requests of honest clients may be asked to come again."""


@dataclass(kw_only=True)
class Target:
    """What an attack gets to work on. It notes answers, what it found out, and what it holds against the server."""

    stage: Stage
    answers: Answers = field(default_factory=Answers)
    found: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def dialer(self, tenant: str | None = ATTACKER) -> Dialer:
        return Dialer(port=self.stage.port, key=self.stage.secrets[tenant] if tenant else None)

    def tokens_of(self, text: str) -> list[int]:
        """As the served model's tokenizer has it."""
        codec = load_codec(self.stage.model, read_tokenizer_config(self.stage.model))
        return codec.encode(text, add_special_tokens=False)

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    async def post(self, path: str, body: Any, *, tenant: str | None = ATTACKER, **options: Any) -> Answer:
        """As the attacker; the answer is noted."""
        return self.answers.note(await self.dialer(tenant).post(path, body, **options))

    @contextlib.asynccontextmanager
    async def store(self) -> Any:
        async with redis.asyncio.Redis(port=self.stage.redis_port, socket_timeout=60) as store:
            yield store


@dataclass(frozen=True, kw_only=True)
class Attack:
    """``finding``: its number in the review, or "own". ``alone``: it does what no client can do to a deployment that
    others use (stops a process, takes the key file away), so it is no part of the soak."""

    name: str
    finding: str
    run: Callable[[Target], Awaitable[None]]
    bounds: Bounds = field(default_factory=Bounds)
    shape: Shape = field(default_factory=Shape)
    alone: bool = False


@dataclass(kw_only=True)
class Record:
    """A run of an attack: what was seen, and which bounds that broke."""

    name: str
    finding: str
    bounds: dict[str, Any]
    seconds: float = 0.0
    seen: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def execute(attack: Attack, stage: Stage) -> Record:
    """Runs it on a thread of its own, which gives way to all others, and judges."""
    assert stage.watch is not None
    target, failures = Target(stage=stage), list[str]()
    before = {role: stage.procs[role].pid for role in stage.alive()}
    kills = {role: cage.kills() for role, cage in stage.cages.items()}
    for cage in stage.cages.values():
        cage.reset_peak()
    began = stage.watch.ask("mark")
    thread = threading.Thread(target=_attack, args=(attack, target, failures))
    thread.start()
    thread.join()
    seconds = time.monotonic() - began
    time.sleep(QUIET_S)
    seen = look(stage, began)
    record = Record(name=attack.name, finding=attack.finding, bounds=asdict(attack.bounds), seconds=round(seconds, 2))
    record.seen = seen | {"answers": dict(target.answers.kinds)} | target.found
    ended = [role for role, pid in before.items() if role not in stage.alive() and pid not in stage.asked_to_end]
    record.broken = [*failures, *(f"{role} ended" for role in ended), *target.wrong]
    record.broken += [
        f"{role} was killed for want of memory" for role, n in kills.items() if stage.cages[role].kills() > n
    ]
    record.broken += [*_judge_answers(attack.bounds, target.answers), *judge(attack.bounds, seen)]
    record.broken += blind(seen, seconds + QUIET_S, crowd=stage.crowd is not None)
    return record


def look(stage: Stage, since: float) -> dict[str, Any]:
    """What the watch and the honest clients saw from ``since`` until now."""
    assert stage.watch is not None
    until = time.monotonic()
    seen: dict[str, Any] = stage.watch.ask("report", since=since, until=until)
    if stage.crowd is not None:
        honest = stage.crowd.ask("report", since=since, until=until)
        seen |= {"honest": honest}
    for role, cage in stage.cages.items():
        seen[f"{role}_cgroup_peak"] = None if (peak := cage.peak()) is None else peak / MIB
    return seen


def _attack(attack: Attack, target: Target, failures: list[str]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    async def bounded() -> None:
        async with asyncio.timeout(attack.bounds.within):
            await attack.run(target)

    try:
        asyncio.run(bounded())
    except TimeoutError:
        failures.append(f"was not over within {attack.bounds.within:g} s")
    except Exception as error:  # noqa: BLE001  whatever an attack trips over is its finding
        failures.append(f"{type(error).__name__}: {error}"[:300])


def _judge_answers(bounds: Bounds, answers: Answers) -> list[str]:
    def fine(kind: str) -> bool:
        return kind.startswith(_SERVED) or kind in bounds.also

    broken = [f"answered {count} times: {kind}" for kind, count in answers.kinds.items() if not fine(kind)]
    if (served := answers.kinds["200"]) < bounds.served:
        broken.append(f"{served} of its requests were served, not {bounds.served}")
    return broken


def blind(seen: dict[str, Any], seconds: float, *, crowd: bool) -> list[str]:
    """What keeps a run of so many ``seconds`` from showing anything: helpers that were late themselves, probes that
    were not sent, honest clients (if there is a ``crowd``) that got nothing."""
    honest = seen.get("honest", {})
    late = {"who watches": seen["own_lag"], "honest clients": honest.get("own_lag", 0.0)}
    broken = [f"{who} were late by {lag:.1f} s themselves" for who, lag in late.items() if lag > _MAX_LAG * seconds]
    if seen["probes"] < _MIN_PROBES_PER_S * seconds:
        broken.append(f"only {seen['probes']} probes in {seconds:.1f} s")
    if crowd and not honest.get("tokens"):
        broken.append("no honest stream got a token")
    return broken


def judge(bounds: Bounds, seen: dict[str, Any]) -> list[str]:
    """Which bounds what was seen breaks."""
    honest = seen.get("honest", {})
    measured = {
        "gap": ("an honest stream waited", honest.get("longest"), "s"),
        "first": ("an honest request waited for its first token", honest.get("first"), "s"),
        "health": ("/health took", seen["health"], "s"),
        "ping": ("Redis took for PING", seen["ping"], "s"),
        "peak": ("the gateway had", seen["rss_peak"], "MiB"),
        "kept": ("the gateway kept", _less(seen["rss_after"], seen["rss_before"]), "MiB"),
        "redis_peak": ("Redis had", seen["redis_peak"], "MiB"),
        "redis_kept": ("Redis kept", _less(seen["used_after"], seen["used_before"]), "MiB"),
    }
    broken = [
        f"{what} {value:.2f} {unit}, not {getattr(bounds, name):g}"
        for name, (what, value, unit) in measured.items()
        if value is not None and value > getattr(bounds, name)
    ]
    broken += [f"{len(seen['failed'])} probes failed: {seen['failed'][0]}"] if seen["failed"] else []
    if faults := honest.get("faults"):
        broken.append(f"{len(faults)} honest streams ended or changed: {faults[0]}")
    if len(refused := honest.get("refused", [])) > bounds.refusals:
        broken.append(f"{len(refused)} honest requests were refused: {refused[0]}")
    return broken


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
