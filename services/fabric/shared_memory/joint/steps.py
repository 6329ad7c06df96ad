"""Joint steps: steps of several clients of a seat that began at about the same time run as one, and read weights once.

Each layer waits for the rows of all members, so that the slowest member sets the pace. A member that stops or is lost
is left out of the remaining layers. Legend: C rows of a joined call, K slots, D hidden size, L layers, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_kernels.exchange.joined.op import send_joined, take_joined
from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.layout import (
    DEADLINE,
    GRACE,
    LATE,
    MEMBER_ANSWERS,
    MEMBER_BASE,
    MEMBER_GONE,
    MEMBER_INBOX,
    MEMBER_LAST,
    MEMBER_OUT,
    MEMBER_ROWS,
    Layout,
    member_word,
)
from services.fabric.shared_memory.busy_time import Watch
from services.fabric.shared_memory.control_block import ControlBlock
from services.fabric.shared_memory.messages import Step, buckets
from services.fabric.shared_memory.steps import Shape, computed, prepared
from services.fabric.tcp.compute import Compute


class JointStepBody:
    """A :class:`services.fabric.shared_memory.steps.Body` for joined calls: up to ``rows`` rows of ``members`` clients.

    ``layers`` lists the layers with experts, in the order of the model. Every exchange adds its pairs to ``counts_LE``,
    int64.
    """

    def __init__(
        self,
        compute: Compute,
        layers: Sequence[int],
        counts_LE: Tensor,
        layout: Layout,
        *,
        members: int,
        rows: int,
    ) -> None:
        self._compute, self._layers, self._counts_LE = compute, list(layers), counts_LE
        self._layout, self.members, self._rows = layout, members, rows
        self.layers = len(layers)
        self.control = ControlBlock(counts_LE.device)
        self.watch: Watch | None = None
        self._joined = Joined.room(rows, layout, counts_LE.device)

    @property
    def shapes(self) -> Iterator[Shape]:
        for bucket in buckets(self._layout.rows):
            if bucket * self.members <= self._rows:
                yield Shape(bucket, members=self.members)

    def run(self, shape: Shape) -> None:
        with torch.inference_mode():
            for exchange in range(self.layers):
                self._exchange(shape.bucket, exchange)

    def _exchange(self, bucket: int, at: int) -> None:
        """Run the exchange of one layer: with one micro-batch its number is the layer's index."""
        joined, layout, words = self._joined.of(bucket * self.members), self._layout, self.control.words
        call: dict[str, Any] = {"layout": layout, "members": self.members, "bucket": bucket, "exchange": at}
        take_joined(joined, words, **call)
        with self.watch.around(at) if self.watch else nullcontext():
            parts = joined.x_CD, joined.taken_CK, joined.weights_CK
            answers = computed(self._compute, self._layers[at], layout, *parts)
            send_joined(answers, joined, self._counts_LE[at], words, **call)


class Client(Protocol):
    """An attention worker at a seat."""

    place: int
    """Number among the seat's clients."""
    layout: Layout
    """Layout of the memory that it shares."""

    @property
    def inbox(self) -> int:
        """Address of the client's rows."""
        ...

    @property
    def answers_at(self) -> int:
        """Address of the client's answers."""
        ...

    def begin(self, step: Step, wait_s: float) -> None:
        """Start ``step`` alone; its exchanges wait ``wait_s`` for rows at most."""
        ...

    def idle(self) -> bool:
        """Return whether the steps that the client runs alone have ended."""
        ...


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that its client has begun and the seat has not."""

    client: Client
    step: Step


class JointStep:
    """Runs steps of several clients, whose memory has one layout, as one. One joint step runs at a time.

    The caller holds a lock around every method.

    Args:
        body: the calls, for up to ``members`` clients.
        wait_s: how long a started step waits for the first rows of a layer.
    """

    def __init__(self, body: JointStepBody, *, wait_s: float) -> None:
        self._body, self._wait_s, self.members = body, wait_s, body.members
        self._shapes = frozenset(body.shapes)
        self._now: list[Client | None] = []
        self._steps = prepared(body)

    @property
    def seconds(self) -> float:
        """Seconds of all exchanges, as :attr:`services.fabric.shared_memory.steps.Steps.seconds`."""
        return self._steps.seconds

    def idle(self) -> bool:
        """Return whether no joint step runs."""
        return self._steps.idle()

    def fits(self, steps: Sequence[PendingStep]) -> bool:
        """Return whether ``steps`` can begin together at once."""
        bucket = max(pending.step.bucket for pending in steps)
        free = self.idle() and all(pending.client.idle() for pending in steps)
        return free and len(steps) <= self.members and self._shape(bucket) in self._shapes

    def start(self, steps: Sequence[PendingStep], grace_s: float) -> None:
        """Begin ``steps`` together; a layer waits ``grace_s`` for late members once the first rows are there."""
        self._now = [pending.client for pending in steps]
        words = {DEADLINE: int(self._wait_s * 1e9), GRACE: int(grace_s * 1e9)}
        for number, pending in enumerate(steps):
            client, step = pending.client, pending.step
            words |= {
                member_word(number, MEMBER_INBOX): client.inbox,
                member_word(number, MEMBER_ANSWERS): client.answers_at,
                member_word(number, MEMBER_BASE): step.base,
                member_word(number, MEMBER_LAST): step.base + self._body.layers,
                member_word(number, MEMBER_ROWS): step.bucket,
            }
        self._steps.start(self._shape(max(pending.step.bucket for pending in steps)), words)

    def leave_out(self, client: Client) -> None:
        """Leave ``client`` out of the running step from the next layer on; return at once."""
        if client in self._now and not self.idle():
            self._body.control.raise_flag(member_word(self._now.index(client), MEMBER_GONE))

    def was_late(self, client: Client) -> bool:
        """Return whether the last step left ``client`` out because its rows came after the grace period."""
        if client not in self._now:
            return False
        return self._body.control.read_word(member_word(self._now.index(client), MEMBER_OUT)) == LATE

    def part(self, client: Client, pause: Callable[[], object]) -> bool:
        """Leave ``client`` out of the running step and return whether its memory is unused then.

        The wait takes as long as a layer, at most ``wait_s``; it calls ``pause`` again and again, in which another step
        may begin.
        """
        now = self._now
        if client not in now:
            return True
        number = now.index(client)
        self.leave_out(client)
        until = time.monotonic() + self._wait_s
        while (
            self._now is now and not self.idle() and not self._body.control.read_word(member_word(number, MEMBER_OUT))
        ):
            if time.monotonic() > until:
                return False
            pause()
        now[number] = None
        return True

    def close(self) -> None:
        """Give up the running step, which then ends by itself."""
        if self.idle():
            self._steps.close()
        else:
            self._steps.give_up()

    def _shape(self, bucket: int) -> Shape:
        return Shape(bucket, members=self.members)
