"""A model of the server under a trace, on a simulated clock: requests queue, get a place, a first token and the rest.

Requests are counted in lots that came at the same time and are alike. All running sequences get tokens at the same
rate, so a lot ends when the count of tokens has grown by the length of its answers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from services.messages import LATENCY_BUCKETS, latency_bucket
from services.planner.day.flow import MAX_PREFILL, Demand, Flow, flow
from services.planner.day.times import ServiceTimes
from services.scheduler.scaling import Load, Signals, Target
from services.scheduler.scaling.meter import (
    LATENCY_HALF_LIFE_S,
    LINE_S,
    LOAD_HALF_LIFE_S,
    STAY_HALF_LIFE_S,
    held_back,
)
from services.scheduler.scaling.rates import Places, Share, Smoothed

LENGTHS = (0.4, 1.0, 1.6)
"""Lengths of the answers, in means; each is that of a third of the requests."""
PARTS = 6
"""Parts of a tick, in each of which requests come, begin and end; a part is shorter than most requests stay."""
NOTHING = 1e-6
"""A smaller part of a request is what rounding leaves."""
TIMEOUT_S = 600.0
"""A request that waits for longer is given up, as with --request-timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Targets of the latencies, seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Requests that come in a tick, and the tokens of each."""

    requests: float
    prompt: float
    output: float


@dataclass(slots=True)
class Lot:
    """Requests that came at the same time. ``first``: the time of their first token."""

    came: float
    requests: float
    prompt: float
    output: float
    first: float = 0.0
    on_time: bool = False


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of requests since the start."""

    ended: float = 0.0
    ttft_met: float = 0.0
    tpot_met: float = 0.0
    both_met: float = 0.0
    given_up: float = 0.0


@dataclass(kw_only=True)
class Server:
    """The model. ``places``: sequences that one attention worker runs."""

    times: ServiceTimes
    targets: Targets
    places: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.queue: deque[Lot] = deque()
        self.queued = self.running = 0.0
        self._ends: list[tuple[float, int, Lot]] = []
        self._number = count()
        self._tokens = self._prompts = self._prefilled = 0.0
        self._step_s = self._at = 0.0
        self._flow: Flow | None = None
        self._ttft, self._tpot = Share(LATENCY_HALF_LIFE_S), Share(LATENCY_HALF_LIFE_S)
        self._latencies = [[0.0] * LATENCY_BUCKETS for _ in range(2)]
        self._work: dict[Target, Smoothed] = {}
        self._line, self._ended = Places(STAY_HALF_LIFE_S, LINE_S), 0.0

    def run(
        self,
        at: float,
        passed_s: float,
        arrivals: Arrivals,
        *,
        attention: int,
        draining: int,
        seats: Sequence[int],
        shares: Sequence[float],
    ) -> None:
        """Run for ``passed_s`` from ``at``. ``attention``: workers that take requests; ``draining``: that end."""
        computing = attention + (draining if self.running > NOTHING else 0)
        demand = Demand(batch=self.running, prefill=self._prefilled / passed_s, shares=shares)
        self._flow = flow(self.times, computing, seats, demand, self._step_s)
        self._step_s = self._flow.step_s if self._flow else self._step_s
        self._prefilled = 0.0
        per_token_s = self.times.attention_prefill + max(shares) * self.times.experts_prefill
        capacity = computing * MAX_PREFILL / per_token_s if per_token_s > 0 else float("inf")
        each_s = passed_s / PARTS
        for part in range(PARTS):
            self._at = at + (part + 0.5) * each_s
            self._come(arrivals, LENGTHS[part % len(LENGTHS)])
            if self._flow is not None:
                self._tokens += each_s / self._step_s
                self._end()
                self._prompts = max(0.0, self._prompts - capacity * each_s)
                self._admit(attention * self.places - self.running, capacity)

    def signals(self, at: float, passed_s: float, replicas: Mapping[Target, int], *, whole: bool) -> Signals:
        """Return the signals of a leader. ``whole``: replicas are engines, each with attention and all shards."""
        now, attention = self._flow, replicas[Target("attention")]
        ended, self._ended = self.tally.ended - self._ended, self.tally.ended
        asked = self._line.asked(self.running, self.queued, ended, passed_s) / self.places
        loads = {
            Target("attention"): Load(
                work=self._smooth(Target("attention"), asked, passed_s),
                ready=attention,
                known=attention > 0,
            )
        }
        for target, ready in replicas.items():
            if target.shard is not None:
                group = target.shard
                work = now.busy[group] * held_back(now.callers, now.waiting[group]) if now else 0.0
                loads[target] = Load(
                    work=self._smooth(target, work, passed_s),
                    ready=ready,
                    known=now is not None and ready > 0,
                    useful=None if whole else max(1, attention),
                    stall=now.stall[group] if now and self.running > NOTHING else 0.0,
                )
        for share, counts in zip((self._ttft, self._tpot), self._latencies, strict=True):
            share.add(counts, passed_s)
        self._latencies = [[0.0] * LATENCY_BUCKETS for _ in range(2)]
        active = self.queued + self.running > NOTHING
        ttft, tpot, few = self._ttft.ratio(), self._tpot.ratio(), self._ttft.counted
        return Signals(at=at, loads=loads, active=active, ttft=ttft, tpot=tpot, few=few)

    def _smooth(self, target: Target, work: float, passed_s: float) -> float:
        return self._work.setdefault(target, Smoothed(LOAD_HALF_LIFE_S)).add(work, passed_s)

    def _come(self, arrivals: Arrivals, length: float) -> None:
        while self.queue and self._at - self.queue[0].came > TIMEOUT_S:
            lot = self.queue.popleft()
            self.queued = max(0.0, self.queued - lot.requests)
            self.tally.given_up += lot.requests
        if arrivals.requests > 0:
            requests = arrivals.requests / PARTS
            self.queue.append(Lot(self._at, requests, arrivals.prompt, max(1.0, arrivals.output * length)))
            self.queued += requests

    def _admit(self, free: float, capacity: float) -> None:
        while self.queue and free > NOTHING:
            lot = self.queue[0]
            taken = min(lot.requests, free)
            free -= taken
            if taken < lot.requests:
                lot.requests -= taken
                lot = Lot(lot.came, taken, lot.prompt, lot.output)
            else:
                self.queue.popleft()
            self.queued, self.running = max(0.0, self.queued - taken), self.running + taken
            self._prompts += taken * lot.prompt
            self._prefilled += taken * lot.prompt
            wait_s = self._prompts / capacity + lot.prompt * self.times.attention_prefill
            self._begin(lot, self._at + wait_s + self._step_s)

    def _begin(self, lot: Lot, first: float) -> None:
        lot.first, ttft_s = first, first - lot.came
        lot.on_time = ttft_s <= self.targets.ttft_s
        self._latencies[0][latency_bucket(ttft_s, self.targets.ttft_s)] += lot.requests
        ends = self._tokens + (first - self._at) / self._step_s + lot.output
        heapq.heappush(self._ends, (ends, next(self._number), lot))

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self._tokens:
            ends, _, lot = heapq.heappop(self._ends)
            ended = self._at - (self._tokens - ends) * self._step_s
            tpot_s = max(0.0, ended - lot.first) / lot.output
            self._latencies[1][latency_bucket(tpot_s, self.targets.tpot_s)] += lot.requests
            met = tpot_s <= self.targets.tpot_s
            self.running = max(0.0, self.running - lot.requests)
            tally = self.tally
            tally.ended += lot.requests
            tally.ttft_met += lot.requests * lot.on_time
            tally.tpot_met += lot.requests * met
            tally.both_met += lot.requests * (met and lot.on_time)
