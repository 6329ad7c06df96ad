"""One group's share of a dispatch: which replica has it, what came of it, and where it goes next.

Legend: R rows of a part, K slots, D hidden size.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

from torch import Tensor

from services.errors import BadAnswer, DeadlineExceeded, ExpertMeshError, ExpertUnavailable
from services.fabric.tcp.calls import Call
from services.fabric.tcp.connection import SeatLink
from services.fabric.tcp.frames import Dispatch
from services.fabric.tcp.peer import deadline_in
from services.fabric.tcp.split import Rows
from services.routing import ShardGroup

log = logging.getLogger(__name__)

_MAX_SENDS = 16
"""Replicas that come and go, or that fail again and again, may not keep a step waiting for ever."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
"""Before a connection over which a part failed gets it again; doubled each time."""
_UNBOUNDED_ROWS = 1 << 20


@dataclass(slots=True, eq=False)
class Part:
    """``again_at``: connections (seat, its count) that this was sent over, and from when on they may have it again, by
    the monotonic clock: a seat that comes back at once, one that failed after a pause, one that answered NaN never."""

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
    without_replica_since: float | None = None

    def abandon(self) -> None:
        if self.call is not None:
            self.call.abandoned = True
            self.call = None

    def pauses(self, now: float) -> bool:
        """Whether a connection that failed may have it again, later."""
        return any(now < again_at < math.inf for again_at in self.again_at.values())


class Seats:
    """The seats of the table in force. Its owner holds the condition that guards the links.

    Args: see :class:`services.fabric.tcp.link.TcpLink`.
    """

    def __init__(self, *, call_s: float, unavailable_s: float, quarantine_s: float) -> None:
        self.links: dict[tuple[int, str, int, str, int], SeatLink] = {}
        self.groups: dict[int, ShardGroup] = {}
        self.closed = False
        self._turns: dict[int, float] = {}
        """By group, where the turn of the seat that was chosen last began: newcomers start from there."""
        self._call_s = call_s
        self._unavailable_s = unavailable_s
        self._quarantine_s = quarantine_s

    def most_rows(self, bytes_per_row: int) -> int:
        """The largest call that every connected seat takes."""
        bounds = [link.most_rows(bytes_per_row) for link in self.links.values() if link.usable]
        return min(bounds, default=_UNBOUNDED_ROWS)

    def lanes(self) -> bool:
        """Whether rows to some seat go from device to device."""
        return any(link.lane for link in self.links.values())

    def settle(self, part: Part) -> bool:
        """Whether ``part`` has its answer; if its call failed or is late, send it to another replica.

        A late call is given up only where another replica is there to take its rows.

        Raises:
            ExpertUnavailable: for ``unavailable_s`` there was none, or the link is closed.
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
        if part.not_finite is not None and not part.pauses(now):  # every replica says so: it is the model's
            part.answer = part.not_finite
            part.abandon()
            return True
        self._wait_for_replica(part, now)
        return False

    def wake_at(self, part: Part) -> float:
        """The monotonic time at which :meth:`settle` may have something to do though nothing has changed."""
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
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (part.sends - 1), _MAX_PAUSE_S)
            part.again_at[link.seat.number, call.connection] = deadline_in(pause_s)
            if isinstance(call.outcome, BadAnswer):
                self._quarantine(link, call.outcome)
        elif call.finite or not part.rows.finite():
            part.answer = call.outcome
            if call.finite:
                self._blame(part)
        else:
            part.not_finite = call.outcome
            part.suspects.append(link)

    def _blame(self, part: Part) -> None:
        for link in part.suspects:
            problem = f"{link.name} answered NaN or infinity where another replica is finite."
            self._quarantine(link, BadAnswer(problem, hint="Is its memory or its copy of the weights damaged?"))

    def _quarantine(self, link: SeatLink, error: ExpertMeshError) -> None:
        if time.monotonic() >= link.quarantined_until:
            log.warning("No calls to %s for %g s: %s", link.name, self._quarantine_s, error)
        link.quarantined_until = deadline_in(self._quarantine_s)

    def _choose(self, part: Part, now: float) -> SeatLink | None:
        """The replica with the fewest rows outstanding for its speed; of equals, with the fewest calls so far for it.

        So the calls of an attention worker, one at a time, go round, and workers that meet at a seat then follow one
        another. One whose lane is not there yet gets rows only where there is no other.
        """

        def order(link: SeatLink) -> tuple[bool, float, float, int]:
            outstanding = link.outstanding_rows / link.seat.capacity
            return link.awaits_lane, outstanding, self._turn(link), link.seat.number

        return min((link for link in self.links.values() if self._may_take(link, part, now)), key=order, default=None)

    def _turn(self, link: SeatLink) -> float:
        return max(link.turn, self._turns.get(link.seat.group, 0.0))

    def _may_take(self, link: SeatLink, part: Part, now: float) -> bool:
        """A table that came since the dispatch may have cut the groups anew: the experts count, not the number."""
        again_at = part.again_at.get((link.seat.number, link.connections), now)
        if not link.usable or now < link.quarantined_until or now < again_at:
            return False
        group = self.groups.get(link.seat.group)
        return group is not None and part.rows.experts <= set(group.experts.get(part.dispatch.layer, ()))

    def _send(self, part: Part, link: SeatLink) -> None:
        if part.call is not None and (late := part.sent_to) is not None:
            part.problem = DeadlineExceeded(f"{late.name} gave no answer within {self._call_s:g} s.")
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
        if connection not in part.again_at:  # what failed here before does not prove that anybody can answer
            part.without_replica_since = None
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
