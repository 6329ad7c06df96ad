"""Whom an attention worker waits for, and how long calls wait for each other at a seat."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch

from services.fabric.tcp.inbox import Call, Inbox
from services.fabric.wait_times import Stalls


def test_a_moment_is_shared_by_those_that_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls, now_s = Stalls(), 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    with stalls.waiting([0, 1]):
        now_s += 4
    now_s += 1
    with stalls.waiting([1]):
        now_s += 2
    assert stalls.totals() == {0: 2.0, 1: 4.0}


def test_a_wait_that_ends_in_an_error_counts() -> None:
    stalls = Stalls()
    with suppress(KeyError), stalls.waiting([3]):
        time.sleep(0.01)
        raise KeyError
    assert stalls.totals()[3] >= 0.01


def call() -> Call:
    row = torch.zeros(1, 1)
    return Call(layer=0, reduced=False, x_RD=row, ids_RK=row, weights_RK=row, answer=lambda _: None)


def test_an_inbox_counts_the_time_of_calls_that_wait_and_of_no_others() -> None:
    inbox = Inbox(rows=8, join_rows=1)
    time.sleep(0.02)
    assert inbox.waited_s == 0.0, "nobody waits"
    began = time.monotonic()
    for _ in range(2):
        inbox.put(call())
    time.sleep(0.02)
    [_] = inbox.take()
    both_waited_s = inbox.waited_s
    assert 0.04 <= both_waited_s <= 2 * (time.monotonic() - began)
    [_] = inbox.take()
    waited_s = inbox.waited_s
    time.sleep(0.02)
    assert inbox.waited_s == waited_s, "what is computed does not wait"
