"""A model of the queue: attempts, leases and ends, as the contract has them, without indexes, fairness and bounds.

In: each script call that Redis has run, with its arguments, its reply and the time. Out: what the records, the leases
and the gateways' streams must then be (:meth:`Model.state`, :attr:`Model.events`). What depends on bounds (which
requests a claim takes, whether a worker had credit) is taken from the reply, and must be possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.queue.limits import QueueLimits

LIVE = ("queued", "claimed", "running", "lost")


@dataclass(slots=True)
class Record:
    state: str
    attempt: int
    reply_to: str
    holder: str = ""
    streamed: bool = False
    delivered: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class Model:
    limits: QueueLimits
    records: dict[str, Record] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    gateways: dict[str, int] = field(default_factory=dict)
    worker_lease: dict[str, int] = field(default_factory=dict)
    events: list[tuple[str, str, str, int]] = field(default_factory=list)
    """Of the last call: (gateway, ``lost`` or the finish, request, attempt)."""
    epoch: str = "0"
    asked: int | None = None
    """When a leader asked for leases last."""
    now: int = 0
    held_until: int = 0
    """End of the hold on reclaiming, as Redis has it after the call."""

    def state(self) -> dict[str, Any]:
        records = {name: (r.state, r.attempt, r.holder, r.reply_to) for name, r in self.records.items()}
        return {"records": records, "leases": self.leases, "workers": self.workers, "gateways": self.gateways}

    def apply(self, script: str, arguments: list[str], reply: Any) -> None:
        """``arguments`` without the limits; ``reply`` is the error's text where the script refused."""
        self.events = []
        if isinstance(reply, str) and "STALELEADER" in reply:
            assert arguments[0] != self.epoch, f"{script} refused the leader"
            return
        if script in ("claim", "assign", "release", "reap_queue", "reap_workers", "reap_leases", "reap_gateways"):
            assert arguments[0] == self.epoch, f"{script} took a former leader's word"
        getattr(self, f"_{script}", lambda *_: None)(arguments, reply)

    # What several scripts do

    def _lease_ms(self) -> int:
        return round(1000 * self.limits.lease_s)

    def _own(self, gateway: str) -> None:
        self.gateways.setdefault(gateway, self.now + self._lease_ms())

    def _create(self, name: str, attempt: int, gateway: str, delivered: int) -> None:
        self.records[name] = Record("queued", attempt, gateway, delivered=delivered)
        self._own(gateway)

    def _queue(self, name: str, attempt: int) -> None:
        record = self.records[name]
        record.state, record.attempt, record.holder, record.streamed = "queued", attempt, "", False
        self.leases.pop(name, None)

    def _lose(self, name: str, attempt: int, *, say: bool) -> None:
        record = self.records[name]
        record.state, record.attempt, record.holder, record.streamed = "lost", attempt, "", False
        self.leases[name] = self.now + round(1000 * self.limits.lost_s)
        if say:
            self.events.append((record.reply_to, "lost", name, attempt))

    def _end(self, name: str, finish: str | None, *, cancelled: bool = False) -> None:
        record = self.records[name]
        if finish is not None:
            self.events.append((record.reply_to, finish, name, record.attempt))
        record.state, record.holder, record.cancelled = "done", "", cancelled
        self.leases.pop(name, None)

    def _move(self, name: str, gateway: str) -> None:
        record = self.records[name]
        if record.reply_to in self.gateways:
            self.events.append((record.reply_to, "cancelled", name, record.attempt))
        record.reply_to = gateway
        self._own(gateway)

    def _held(self, worker: str) -> list[str]:
        return [name for name, r in self.records.items() if r.state == "running" and r.holder == worker]

    def _runs(self, name: str, attempt: str, worker: str) -> bool:
        r = self.records.get(name)
        return r is not None and (r.state, r.attempt, r.holder) == ("running", int(attempt), worker)

    def _bereave(self, worker: str) -> None:
        for name in self._held(worker):
            self._lose(name, self.records[name].attempt + 1, say=True)
        self.workers.pop(worker, None)

    def _on_hold(self) -> bool:
        stood_still = self.asked is not None and self.now - self.asked > self._lease_ms() * 2 / 3
        self.asked = self.now
        assert not stood_still or self.held_until > self.now, "nobody could renew a lease, and none was spared"
        return self.held_until > self.now

    # Scripts

    def _campaign(self, _: list[str], reply: int) -> None:
        if reply:
            assert reply > int(self.epoch), "epochs rise"
            self.epoch = str(reply)

    def _gateway_heartbeat(self, a: list[str], _: Any) -> None:
        self.gateways[a[0]] = self.now + int(a[1])

    def _register(self, a: list[str], _: Any) -> None:
        self.worker_lease[a[0]] = int(a[1])
        self.workers[a[0]] = self.now + int(a[1])

    def _admit(self, a: list[str], reply: list[Any]) -> None:
        if reply[0] != b"ok":
            return
        for place, at in enumerate(range(13, len(a), 8)):
            if a[at] not in self.records:
                self._create(a[at], 1, a[1], int(a[at + 4]))
            assert reply[1 + 2 * place] == self.records[a[at]].attempt

    def _claim(self, a: list[str], rows: list[list[Any]]) -> None:
        for row in rows:
            record = self.records[row[0].decode()]
            assert (record.state, record.attempt, record.reply_to) == ("queued", row[2], row[4].decode())
            record.state, record.holder = "claimed", a[0]
            self.leases[row[0].decode()] = self.now + self._lease_ms()

    def _assign(self, a: list[str], waited: list[int]) -> None:
        for at, ms in zip(range(1, len(a), 4), waited, strict=True):
            name, worker, record = a[at], a[at + 2], self.records.get(a[at])
            mine = record is not None and (record.state, record.holder) == ("claimed", a[0])
            if mine and record is not None and record.attempt == int(a[at + 1]):
                if ms < 0:
                    self._queue(name, record.attempt)
                    continue
                assert self.workers.get(worker, 0) > self.now, "a worker without a lease got a request"
                record.state, record.holder = "running", worker
                self.leases[name] = self.now + self.worker_lease[worker]
            else:
                assert ms < 0, f"{name} was assigned, though its claim is gone"

    def _release(self, a: list[str], _: Any) -> None:
        for name in a[2:]:
            record = self.records.get(name)
            if record is not None and (record.state, record.holder) == ("claimed", a[0]):
                self._queue(name, record.attempt)

    def _publish(self, a: list[str], reply: list[Any]) -> None:
        quads = [a[at : at + 4] for at in range(1, len(a), 4)]
        mine = [self._runs(name, attempt, a[0]) for name, attempt, _, _ in quads]
        assert reply[0] == [place for place, accepted in enumerate(mine) if not accepted], "events refused"
        for (name, _, generated, _), accepted in zip(quads, mine, strict=True):
            if accepted:
                self.records[name].streamed = True
                if int(generated) >= 0:
                    self._end(name, "stop")

    def _worker_heartbeat(self, a: list[str], reply: list[int] | None) -> None:
        assert (reply is None) == (a[0] not in self.workers), "only who is not registered is not known"
        if reply is None:
            return
        self.workers[a[0]] = self.now + self.worker_lease[a[0]]
        lost = [not self._runs(name, attempt, a[0]) for name, attempt in zip(a[1::2], a[2::2], strict=True)]
        assert reply == [place for place, gone in enumerate(lost) if gone], "leases lost"
        for name, gone in zip(a[1::2], lost, strict=True):
            if not gone:
                self.leases[name] = self.workers[a[0]]

    def _deregister(self, a: list[str], _: Any) -> None:
        suspects = dict(zip(a[1::2], map(int, a[2::2]), strict=True))
        for name in self._held(a[0]):
            record = self.records[name]
            if record.streamed or suspects.get(name) == record.attempt:
                self._lose(name, record.attempt + 1, say=True)
            else:
                self._queue(name, record.attempt)
        self.workers.pop(a[0], None)

    def _death_notice(self, a: list[str], reply: int) -> None:
        assert reply == (a[0] in self.workers)
        self._bereave(a[0])

    def _give_up(self, a: list[str], _: Any) -> None:
        for name, attempt in zip(a[2::2], a[3::2], strict=True):
            if self._runs(name, attempt, a[0]):
                record = self.records[name]
                if record.streamed:
                    self._lose(name, record.attempt + 1, say=True)
                else:
                    self._queue(name, record.attempt)

    def _cancel(self, a: list[str], reply: int) -> None:
        live = [n for n in a[1::2] if (r := self.records.get(n)) and r.state != "done" and r.reply_to == a[0]]
        assert reply == len(live), "requests cancelled"
        for name in live:
            self._end(name, None, cancelled=True)

    def _resubmit(self, a: list[str], reply: int) -> None:
        name, attempt, gateway, record = a[0], int(a[1]), a[2], self.records.get(a[0])
        if reply < 0:
            return
        if record is None:
            self._create(name, attempt, gateway, int(a[7]))
            return
        foreign = record.state == "done" or record.reply_to != gateway or record.attempt > attempt
        assert reply == (0 if foreign else 1), f"{name} {record} resubmitted as {attempt}"
        if not foreign and (record.attempt < attempt or record.state == "lost"):
            self._queue(name, attempt)
            record.delivered = int(a[7])

    def _resync(self, a: list[str], reply: int) -> None:
        name, attempt, gateway, record = a[0], int(a[1]), a[2], self.records.get(a[0])
        wanted = attempt + 1
        if record is not None:
            wanted = max(record.attempt, attempt) + 1
            if record.reply_to != gateway:
                if a[3] != "1":
                    wanted = 0
                elif record.state != "done":
                    self._move(name, gateway)
            elif record.cancelled:
                wanted = 0
            if wanted and record.state == "done":
                del self.records[name]
            elif wanted and record.state == "lost" and record.attempt > attempt:
                wanted = record.attempt
            elif wanted:
                self._lose(name, wanted, say=False)
        assert reply == wanted, "the attempt to resubmit as"

    def _take_up(self, a: list[str], reply: list[Any]) -> None:
        name, gateway, record = a[0], a[1], self.records.get(a[0])
        if reply[0] != b"ok":
            assert reply[0] == b"prompt" or record is None or record.state == "done", "a live request was refused"
            return
        if record is None or record.state == "done":
            attempt = record.attempt + 1 if record is not None else 1
            self._create(name, attempt, gateway, 0)
        else:
            if record.reply_to != gateway:
                self._move(name, gateway)
            untouched = not record.streamed and record.delivered == 0
            attempt = record.attempt if untouched else record.attempt + 1
            if not untouched or record.state == "lost":
                self._queue(name, attempt)
                record.delivered = 0
        assert reply[1] == attempt, "the attempt that was taken up"

    def _survey(self, a: list[str], reply: list[Any]) -> None:
        for name, state, attempt in zip(a[1:], reply[::2], reply[1::2], strict=True):
            record = self.records.get(name)
            if record is None:
                assert (state, attempt) == (b"missing", 0)
                continue
            moved = record.reply_to != a[0]
            assert (state.decode(), attempt) == ("moved" if moved else record.state, record.attempt)
            if not moved and record.state in LIVE[1:]:
                self.leases.setdefault(name, self.now + self._lease_ms())

    def _reap_queue(self, a: list[str], _: Any) -> None:
        for name, record in self.records.items():
            if record.state == "claimed" and int(record.holder) < int(a[0]):
                self._queue(name, record.attempt)

    def _reap_workers(self, _: list[str], reply: Any) -> None:
        dead = [] if self._on_hold() else [worker for worker, end in self.workers.items() if end <= self.now]
        for worker in dead:
            self._bereave(worker)
        assert reply[0] == len(dead), "workers removed"

    def _reap_leases(self, *_: Any) -> None:
        if self._on_hold():
            return
        for name in [name for name, end in self.leases.items() if end <= self.now]:
            record = self.records[name]
            if record.state == "claimed":
                self._queue(name, record.attempt)
            elif record.state == "running":
                self._lose(name, record.attempt + 1, say=True)
            else:
                self._end(name, "error")

    def _reap_gateways(self, *_: Any) -> None:
        if self._on_hold():
            return
        for gateway in [gateway for gateway, end in self.gateways.items() if end <= self.now]:
            for name in [n for n, r in self.records.items() if r.state != "done" and r.reply_to == gateway]:
                self._end(name, "cancelled")
            del self.gateways[gateway]
