"""Turns what the leader reads from Redis every second or two into the policy's signals: work by target.

A shard group's work is the time that its seats compute, and what they would compute in addition if no call waited for
another. Of A attention workers that step, W on average wait behind others: A - W of them make progress, and without
waiting the calls would come A / (A - W) times as fast (each worker has one exchange under way, or one for each
micro-batch: a closed queue). Two workers call a seat that computes all the time (busy 1, A = 2), and half of the time
one of them waits for the other (W = 0.5): the work is 1 * 2 / 1.5 = 1.33 replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.messages import LATENCY_BUCKETS, GatewayLoad, WorkerLoad
from services.queue.loads import Loads
from services.queue.scheduler_side import QueueDepth, WorkerState
from services.queue.seats import SeatState
from services.scheduler.scaling.rates import Places, Rates, Share, Smoothed
from services.scheduler.scaling.signals import Load, Signals
from services.scheduler.scaling.targets import Replicas, Target

LOAD_HALF_LIFE_S = 4.0
LATENCY_HALF_LIFE_S = 10.0
STAY_HALF_LIFE_S, LINE_S = 30.0, 10.0
"""Arguments of :class:`Places`."""
MAX_HELD_BACK = 4.0
"""Limit of the factor on measured work, where most workers wait."""
SLOTS, TOKENS = 64, 65_536
"""Assumed size of an attention worker before there was one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is known at one moment; ``at`` is in seconds. ``counts`` None: they are not known."""

    at: float
    seats: Sequence[SeatState]
    workers: Sequence[WorkerState]
    loads: Loads
    depth: QueueDepth
    counts: Mapping[Target, Replicas] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReading:
    """A shard group for series: means over its seats of rows that are accepted and not answered, of the share of time
    that they are ``busy``, and of calls that wait for others. ``stall`` is :attr:`Load.stall`."""

    rows: float
    busy: float
    waiting: float
    stall: float


class Meter:
    """Measures for one leader.

    ``groups``: how many shard groups there are at least; ``lease_s``: reports older than this do not count; ``ranks``:
    attention workers that are one replica.
    """

    def __init__(self, *, groups: int, lease_s: float, ranks: int = 1) -> None:
        self._groups = set(range(groups))
        self._lease_s, self._ranks = lease_s, ranks
        self._seats, self._workers, self._gateways = (Rates(LOAD_HALF_LIFE_S) for _ in range(3))
        self._ttft, self._tpot = Share(LATENCY_HALF_LIFE_S), Share(LATENCY_HALF_LIFE_S)
        self._reported: dict[str, GatewayLoad] = {}
        self._places, self._demand = Places(STAY_HALF_LIFE_S, LINE_S), Smoothed(LOAD_HALF_LIFE_S)
        self._ended = 0
        self._slots, self._tokens = float(SLOTS), float(TOKENS)
        self._at: float | None = None
        self.groups: dict[int, GroupReading] = {}
        """Last reading of each group."""

    def signals(self, reading: Reading) -> Signals:
        passed_s = 0.0 if self._at is None else reading.at - self._at
        self._at = reading.at
        self._groups |= {seat.report.group for seat in reading.seats if seat.report.group is not None}
        arrived = self._note_gateways(reading, passed_s)
        self._note_workers(reading)
        self._note_seats(reading)
        loads = self._of_groups(reading)
        loads[Target("attention")] = self._of_attention(reading, passed_s)
        loads[Target("gateway")] = self._of_gateways(reading)
        under_way = reading.depth.requests + sum(worker.outstanding_requests for worker in reading.workers)
        return Signals(
            at=reading.at,
            loads=loads,
            active=under_way > 0 or arrived,
            ttft=self._ttft.ratio(),
            tpot=self._tpot.ratio(),
            few=self._ttft.counted,
        )

    def _note_gateways(self, reading: Reading, passed_s: float) -> bool:
        """Return whether a request came since the last reading."""
        reported, first = reading.loads.gateways, not self._reported
        news = [] if first else [_since(load, self._reported.get(name)) for name, load in reported.items()]
        self._reported |= reported
        self._ttft.add(_sums([load.ttft for load in news]), passed_s)
        self._tpot.add(_sums([load.tpot for load in news]), passed_s)
        for name, load in reported.items():
            self._gateways.note(name, load.up_s, {"cpu": load.cpu_s}, reading.at)
        self._gateways.keep(reported)
        self._ended = sum(load.ended for load in news)
        return any(load.came for load in news)

    def _note_workers(self, reading: Reading) -> None:
        for name, load in reading.loads.workers.items():
            if load is not None:
                stalls = {f"stalled {group}": seconds for group, seconds in load.stalled_s.items()}
                self._workers.note(name, load.up_s, {"busy": load.busy_s, **stalls}, reading.at)
        self._workers.keep(reading.loads.workers)

    def _note_seats(self, reading: Reading) -> None:
        for seat in reading.seats:
            if (load := seat.report.load) is not None:
                totals = {"busy": load.busy_s, "waited": load.waited_s}
                self._seats.note(seat.info.id, load.up_s, totals, reading.at)
        self._seats.keep([seat.info.id for seat in reading.seats])

    def _of_groups(self, reading: Reading) -> dict[Target, Load]:
        seats: dict[int, list[SeatState]] = {group: [] for group in sorted(self._groups)}
        for seat in reading.seats:
            if seat.report.group is not None and seat.stays and seat.status == "ready":
                seats[seat.report.group].append(seat)
        callers = self._callers(reading)
        useful = max(1, sum(_lanes(load) for load in reading.loads.workers.values()))
        return {
            Target("experts", group): self._of_group(group, its, reading, callers, useful)
            for group, its in seats.items()
        }

    def _of_group(self, group: int, seats: Sequence[SeatState], reading: Reading, callers: float, useful: int) -> Load:
        """Measure a group; attention workers have ``callers`` exchanges under way on average, ``useful`` at most."""
        names = [seat.info.id for seat in seats]
        busy, waiting = self._seats.total("busy", names), self._seats.total("waited", names)
        stall = self._stall(group, reading)
        count = max(1, len(seats))
        self.groups[group] = GroupReading(
            rows=sum(seat.report.outstanding_rows for seat in seats) / count,
            busy=busy / count,
            waiting=waiting / count,
            stall=stall,
        )
        fresh = bool(seats) and all(self._seats.fresh(name, reading.at, self._lease_s) for name in names)
        return Load(
            work=busy * held_back(callers, waiting),
            ready=len(seats),
            known=fresh and len(seats) >= _ready(reading, Target("experts", group)),
            useful=useful,
            stall=stall,
        )

    def _callers(self, reading: Reading) -> float:
        """Return exchanges that attention workers would have under way at a time if their steps were nothing else."""
        return sum(self._workers.of(name, "busy") * _lanes(load) for name, load in reading.loads.workers.items())

    def _stall(self, group: int, reading: Reading) -> float:
        """Return the share of the attention workers' time in steps that they spend waiting for ``group``."""
        busy = self._workers.total("busy", reading.loads.workers)
        return min(1.0, self._workers.total(f"stalled {group}", reading.loads.workers) / busy) if busy > 0 else 0.0

    def _of_attention(self, reading: Reading, passed_s: float) -> Load:
        workers = [worker for worker in reading.workers if worker.credit_requests > 0]
        if workers:
            self._slots = sum(worker.info.max_num_seqs for worker in workers) / len(workers)
            self._tokens = sum(worker.credit_tokens for worker in workers) / len(workers)
        running = sum(worker.outstanding_requests for worker in reading.workers)
        places = self._places.asked(running, reading.depth.requests, self._ended, passed_s)
        tokens = sum(worker.outstanding_tokens for worker in reading.workers)
        demand = max(places / self._slots, tokens / self._tokens) / self._ranks
        whole = len(workers) // self._ranks
        return Load(
            work=self._demand.add(demand, passed_s),
            ready=whole,
            known=whole > 0 and whole >= _ready(reading, Target("attention")),
        )

    def _of_gateways(self, reading: Reading) -> Load:
        names = reading.loads.gateways
        fresh = bool(names) and all(self._gateways.fresh(name, reading.at, self._lease_s) for name in names)
        known = fresh and len(names) >= _ready(reading, Target("gateway"))
        return Load(work=self._gateways.total("cpu", names), ready=len(names), known=known)


def held_back(callers: float, waiting: float) -> float:
    """Say by what factor calls would come faster if none of ``callers``, of which ``waiting`` wait, waited for another.

    >>> held_back(2, 0.5)
    1.3333333333333333
    """
    if waiting <= 0 or callers <= 0:
        return 1.0
    return callers / max(callers - waiting, callers / MAX_HELD_BACK)


def _lanes(load: WorkerLoad | None) -> int:
    return load.lanes if load else 1


def _ready(reading: Reading, target: Target) -> int:
    """Return the ready replicas by the counts; 0: they are not known."""
    replicas = reading.counts.get(target) if reading.counts else None
    return replicas.ready if replicas else 0


def _since(load: GatewayLoad, earlier: GatewayLoad | None) -> GatewayLoad:
    """Return the load since ``earlier``; all of it, where that is None or of an earlier process."""
    if earlier is None or earlier.up_s > load.up_s:
        return load
    return GatewayLoad(
        up_s=load.up_s - earlier.up_s,
        cpu_s=load.cpu_s - earlier.cpu_s,
        came=load.came - earlier.came,
        ended=load.ended - earlier.ended,
        ttft=tuple(new - old for new, old in zip(load.ttft, earlier.ttft, strict=True)),
        tpot=tuple(new - old for new, old in zip(load.tpot, earlier.tpot, strict=True)),
    )


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)] if counts else [0] * LATENCY_BUCKETS
