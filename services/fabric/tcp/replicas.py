"""One group's share of a dispatch: which replica computes it, with which result, and where it goes after a failure.

Legend: R rows of a part, K slots, D hidden size.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from services.errors import BadAnswer, DeadlineExceeded, ExpertMeshError, ExpertUnavailable, SeatLeaving, SeatLost
from services.fabric.tcp.calls import Call
from services.fabric.tcp.connection import SeatLink
from services.fabric.tcp.frames import Dispatch
from services.fabric.tcp.peer import deadline_in
from services.fabric.tcp.split import Rows
from services.metrics.attention import ResendReason
from services.routing import ShardGroup

log = logging.getLogger(__name__)

_MAX_SENDS = 16
"""Largest number of times that a part is sent: replicas that fail again and again must not delay a step for ever."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
"""Pause before a connection over which a part failed gets the part again; doubled each time."""
_UNBOUNDED_ROWS = 1 << 20
_REASONS: Mapping[type[ExpertMeshError], ResendReason] = {
    BadAnswer: "bad_answer",
    SeatLeaving: "leaving",
    SeatLost: "lost",
}


@dataclass(slots=True, eq=False)
class Part:
    """The rows of one call, and what has become of them. Times are of the monotonic clock.

    ``suspects`` are seats that answered NaN or infinity for finite rows. ``again_at`` says, for each (seat, connection)
    that had the part, when it may have it again: after a pause if the part failed there, never if its answer was not
    finite. A seat that reconnects has a new connection.
    """

    rows: Rows
    dispatch: Dispatch
    call: Call | None = None
    sent_to: SeatLink | None = None
    answer: Tensor | None = None
    not_finite: Tensor | None = None
    suspects: list[SeatLink] = field(default_factory=list)
    again_at: dict[tuple[int, int], float] = field(default_factory=dict)
    sends: int = 0
    problem: ExpertMeshError | None = None
    reason: ResendReason = "failed"
    """Why the last replica that had the part has not answered it, as a label."""
    without_replica_since: float | None = None

    def abandon(self) -> None:
        """Wait no longer for the call in flight."""
        if self.call is not None:
            self.call.abandoned = True
            self.call = None

    def pauses(self, now: float) -> bool:
        """Return whether the part may later be sent over a connection again that it failed on."""
        return any(now < again_at < math.inf for again_at in self.again_at.values())


class Seats:
    """The seats of the current table. The caller holds the condition that guards the links.

    :class:`services.fabric.tcp.link.TcpLink` documents the arguments.
    """

    def __init__(self, *, call_s: float, unavailable_s: float, quarantine_s: float) -> None:
        self.links: dict[tuple[int, str, int, str, int], SeatLink] = {}
        self.groups: dict[int, ShardGroup] = {}
        self.closed = False
        self.resent: Counter[str] = Counter()
        """Rows that were sent to another replica, by the reason."""
        self._turns: dict[int, float] = {}
        """Group -> turn of the seat that was chosen last, before the call; new seats start from there."""
        self._call_s = call_s
        self._unavailable_s = unavailable_s
        self._quarantine_s = quarantine_s

    def max_rows(self, bytes_per_row: int) -> int:
        """Return the number of rows in the largest call that every connected seat takes."""
        bounds = [link.max_rows(bytes_per_row) for link in self.links.values() if link.usable]
        return min(bounds, default=_UNBOUNDED_ROWS)

    def lanes(self) -> bool:
        """Return whether rows to some seat go from device to device."""
        return any(link.lane for link in self.links.values())

    def update(self, part: Part) -> bool:
        """Send ``part`` to another replica if its call failed or is late; return whether it has its answer.

        A late call is given up only where another replica can take its rows.

        Raises:
            ExpertUnavailable: there was no replica for ``unavailable_s``, or the link is closed.
        """
        self._take_outcome(part)
        if part.answer is not None:
            return True
        now = time.monotonic()
        if part.call is not None and now < part.call.deadline:
            return False
        if (link := self._choose(part, now)) is not None:
            self._send(part, link)
            return False
        if part.not_finite is not None and not part.pauses(now):  # all replicas agree: the model makes such values
            part.answer = part.not_finite
            part.abandon()
            return True
        self._wait_for_replica(part, now)
        return False

    def wake_at(self, part: Part) -> float:
        """Return the time of the monotonic clock at which :meth:`update` must be called even if nothing changes."""
        now = time.monotonic()
        if part.call is not None and (now < part.call.deadline or part.without_replica_since is None):
            return part.call.deadline
        ends = [link.quarantined_until for link in self.links.values()] + list(part.again_at.values())
        assert part.without_replica_since is not None
        return min([part.without_replica_since + self._unavailable_s, *(end for end in ends if end > now)])

    def _take_outcome(self, part: Part) -> None:
        call, link = part.call, part.sent_to
        if call is None or link is None or call.outcome is None:
            return
        part.call = None
        if isinstance(call.outcome, ExpertMeshError):
            part.problem = call.outcome
            part.reason = _REASONS.get(type(call.outcome), "failed")
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (part.sends - 1), _MAX_PAUSE_S)
            part.again_at[link.seat.number, call.connection] = deadline_in(pause_s)
            if isinstance(call.outcome, BadAnswer):
                self._quarantine(link, call.outcome)
        elif call.finite or not part.rows.finite():
            part.answer = call.outcome
            if call.finite:
                self._quarantine_suspects(part)
        else:
            part.not_finite, part.reason = call.outcome, "not_finite"
            part.suspects.append(link)

    def _quarantine_suspects(self, part: Part) -> None:
        for link in part.suspects:
            problem = f"{link.name} answered NaN or infinity where another replica is finite."
            self._quarantine(link, BadAnswer(problem, hint="Is its memory or its copy of the weights damaged?"))

    def _quarantine(self, link: SeatLink, error: ExpertMeshError) -> None:
        if time.monotonic() >= link.quarantined_until:
            log.warning("quarantined for %g s: %s", self._quarantine_s, error)
        link.quarantined_until = deadline_in(self._quarantine_s)

    def _choose(self, part: Part, now: float) -> SeatLink | None:
        """Choose the replica with the least outstanding rows for its speed; of equals, that with the least calls.

        Calls of an attention worker, one at a time, so go round the replicas, and workers that meet at a seat follow
        one another. A replica whose lane is being opened gets rows only where there is no other replica.
        """

        def order(link: SeatLink) -> tuple[bool, float, float, int]:
            outstanding = link.outstanding_rows / link.seat.capacity
            return link.awaits_lane, outstanding, self._turn(link), link.seat.number

        return min((link for link in self.links.values() if self._may_take(link, part, now)), key=order, default=None)

    def _turn(self, link: SeatLink) -> float:
        return max(link.turn, self._turns.get(link.seat.group, 0.0))

    def _may_take(self, link: SeatLink, part: Part, now: float) -> bool:
        """Return whether ``link`` may compute ``part``.

        It must hold the experts: a table since the dispatch may have given other experts to the group's number.
        """
        again_at = part.again_at.get((link.seat.number, link.connections), now)
        if not link.usable or now < link.quarantined_until or now < again_at:
            return False
        group = self.groups.get(link.seat.group)
        return group is not None and part.rows.experts <= set(group.experts.get(part.dispatch.layer, ()))

    def _send(self, part: Part, link: SeatLink) -> None:
        if part.call is not None and (late := part.sent_to) is not None:
            part.reason = "late"
            part.problem = DeadlineExceeded(f"{late.name} did not answer within {self._call_s:g} s.")
            self._quarantine(late, part.problem)
            part.again_at[late.seat.number, part.call.connection] = late.quarantined_until
            part.abandon()
        if part.sends >= _MAX_SENDS:
            raise self._unavailable(part)
        rows, reduced = part.rows, part.dispatch.reduced
        tensors = [rows.ids_RK, rows.weights_RK] if reduced else [rows.ids_RK]
        answer_rows = len(rows.index_R) if reduced else len(rows.pairs_P)
        self._turns[link.seat.group] = begins = self._turn(link)
        link.turn = begins + 1 / link.seat.capacity
        connection = (link.seat.number, link.connections)
        if connection not in part.again_at:  # a connection that failed before does not prove that a replica answers
            part.without_replica_since = None
        if part.sends:
            self.resent[part.reason] += len(rows.index_R)
        part.again_at[connection] = math.inf
        part.sends += 1
        part.sent_to = link
        part.call = link.send(part.dispatch, tensors, rows.x_RD, answer_rows, deadline_in(self._call_s))

    def _wait_for_replica(self, part: Part, now: float) -> None:
        if part.without_replica_since is None:
            part.without_replica_since = now
        if self.closed or now >= part.without_replica_since + self._unavailable_s:
            raise self._unavailable(part)

    def _unavailable(self, part: Part) -> ExpertUnavailable:
        group, problem = part.rows.group, part.problem
        if problem is None:
            problem = next((link.problem for link in self.links.values() if link.seat.group == group), None)
        because = f" Last: {problem.message}" if problem is not None else ""
        return ExpertUnavailable(
            f"No replica of shard group {group} could compute layer {part.dispatch.layer} "
            f"within {self._unavailable_s:g} s.{because}",
            hint="Try again when one is back.",
            retry_after_s=self._unavailable_s,
        )
