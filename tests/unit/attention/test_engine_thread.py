"""The engine's thread: commands before steps, the bounded buffer, silence after a stop, and its death."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
from testkit.models.engines import ask
from testkit.models.stepping import SteppingEngine, continuation
from testkit.waiting import until

from services.attention.engine_thread import Add, EngineThread, Stop
from services.messages import EVENT_BYTES, SCORE_BYTES, PromptScores, TokenEvent, TokenLogprob, event_bytes


class Rig:
    """A thread with everything it reports."""

    def __init__(self, buffer_tokens: int | None = 1000, buffer_bytes: int = 1 << 30) -> None:
        self.engine = SteppingEngine(step_s=0.0)
        self.announced = 0
        self.endings: list[BaseException | None] = []
        self.after_steps = 0
        self.events: list[TokenEvent] = []
        self.thread = EngineThread(
            self.engine,
            buffer_tokens=buffer_tokens,
            buffer_bytes=buffer_bytes,
            on_events=self._announce,
            on_end=self.endings.append,
            after_step=self._after_step,
        )
        self.thread.start()

    def _announce(self) -> None:
        self.announced += 1

    def _after_step(self) -> None:
        self.after_steps += 1

    def add(self, name: str, max_tokens: int = 4, attempt: int = 1) -> None:
        self.thread.send(Add(ask(name, [1, 2, 3], max_tokens, attempt=attempt)))

    def stop(self, name: str) -> None:
        self.thread.send(Stop(name, 1))

    def hears_the_end(self, attempt: int = 1) -> bool:
        """Takes what there is; whether the end of such an attempt has come."""
        self.collect()
        return any(event.finish and event.attempt == attempt for event in self.events)

    def indices(self, name: str, attempt: int = 1) -> list[int]:
        """Of the tokens taken so far."""
        return [event.index for event in self.events if (event.request_id, event.attempt) == (name, attempt)]

    def collect(self, limit: int = 1000) -> list[TokenEvent]:
        taken = self.thread.take(limit, 1 << 30)
        self.thread.published(taken)
        self.events += taken
        return taken


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Its buffer is as large as the test's parameter says."""
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    rig.engine.gate.set()
    rig.thread.stop()


def buffer(**sizes: int | None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", [sizes], indirect=True)


def test_tokens_come_out_in_order_and_are_announced_once_per_taking(rig: Rig) -> None:
    rig.add("a", 20)
    until(lambda: rig.thread.unpublished == 20)
    assert rig.announced == 1
    assert [event.index for event in rig.collect(7)] == list(range(7))
    rig.collect()
    assert [event.token_id for event in rig.events] == continuation([1, 2, 3], 20)
    assert rig.events[-1].finish == "length"
    assert rig.thread.unpublished == 0


def test_an_idle_thread_takes_no_steps_and_wakes_at_once(rig: Rig) -> None:
    """At once: as a rule, for the machine may hold a thread up now and then."""
    took_s: list[float] = []
    for number in range(11):
        time.sleep(0.02)
        assert rig.engine.steps == number
        started = time.monotonic()
        rig.add(f"r{number}", 1)
        until(lambda: rig.thread.unpublished)
        took_s.append(time.monotonic() - started)
        rig.collect()
    assert statistics.median(took_s) < 0.05


def test_time_without_a_sequence_is_idle_and_no_other(rig: Rig) -> None:
    until(lambda: rig.thread.idle_s > 0.1)
    rig.engine.gate.clear()
    rig.add("a", 3)
    until(lambda: rig.thread.step is not None)
    before = rig.thread.idle_s
    time.sleep(0.1)
    assert rig.thread.idle_s == before, "a step runs"
    rig.engine.gate.set()
    until(lambda: not rig.engine.has_work)
    until(lambda: rig.thread.idle_s > before)


def test_a_stop_takes_effect_before_the_next_step_and_nothing_follows(rig: Rig) -> None:
    rig.engine.gate.clear()
    rig.add("a", 1000)
    until(lambda: rig.thread.step is not None)
    rig.add("b", 3)
    rig.stop("a")  # while the first step runs
    rig.engine.gate.set()
    until(lambda: rig.engine.cancelled == [("a", 1)] and rig.thread.unpublished >= 4)
    until(lambda: not rig.engine.has_work)
    rig.collect()
    assert rig.indices("a") == [0]  # of the step that ran when it was stopped
    assert all(event.finish != "cancelled" for event in rig.events)
    assert rig.indices("b") == [0, 1, 2]


def test_a_stopped_request_can_come_back_as_a_later_attempt(rig: Rig) -> None:
    rig.add("a", 10**6)
    until(lambda: rig.thread.unpublished > 5)
    rig.stop("a")
    rig.add("a", 3, attempt=2)
    until(lambda: rig.hears_the_end(attempt=2))
    assert rig.indices("a", attempt=2) == [0, 1, 2]


@pytest.mark.parametrize("times", [1, 2])
def test_an_attempt_stopped_and_assigned_again_during_one_step_is_heard_from_its_first_token(
    rig: Rig, times: int
) -> None:
    """A crash can make Redis forget an assignment: the worker drops the attempt, and then gets the same one again. It
    may come back more than once, as while experts come and go."""
    rig.engine.gate.clear()
    rig.add("a")
    until(lambda: rig.thread.step is not None)
    for _ in range(times):
        rig.stop("a")
        rig.add("a")
    rig.engine.gate.set()
    until(rig.hears_the_end)
    assert rig.indices("a") == [0, 0, 1, 2, 3], "the first is of the step that ran when it was stopped"
    assert [event.finish for event in rig.events if event.finish] == ["length"]
    assert [event.token_id for event in rig.events][-4:] == continuation([1, 2, 3], 4)
    rig.add("a", attempt=2)
    until(lambda: rig.hears_the_end(attempt=2))


def test_a_stop_for_an_earlier_attempt_is_ignored(rig: Rig) -> None:
    rig.add("a", 50, attempt=2)
    rig.stop("a")
    until(lambda: rig.thread.unpublished == 50)
    assert rig.engine.cancelled == []


@buffer(buffer_tokens=10)
def test_the_buffer_is_bounded_by_one_step_more_and_the_engine_goes_on_after(rig: Rig) -> None:
    for name in "abc":
        rig.add(name, 40)
    until(lambda: rig.thread.unpublished >= 10)
    time.sleep(0.05)
    assert 10 <= rig.thread.unpublished < 10 + 3
    while len(rig.events) < 120:
        rig.collect(5)
        assert rig.thread.unpublished < 10 + 3
        time.sleep(0.0005)
    for name in "abc":
        assert rig.indices(name) == list(range(40))


@buffer(buffer_tokens=5)
def test_a_paused_engine_still_hears_stops(rig: Rig) -> None:
    rig.add("a", 1000)
    until(lambda: rig.thread.unpublished == 5)
    steps, seen = rig.engine.steps, rig.after_steps
    rig.stop("a")
    until(lambda: rig.engine.cancelled)
    until(lambda: rig.after_steps > seen)
    assert rig.engine.steps == steps


def test_a_broken_engine_ends_the_thread_and_says_why(rig: Rig) -> None:
    rig.engine.fail = True
    rig.add("a")
    until(lambda: rig.endings)
    assert isinstance(rig.endings[0], ZeroDivisionError)


def test_stopping_ends_the_thread_without_a_failure(rig: Rig) -> None:
    rig.thread.stop()
    assert rig.endings == [None]


@buffer(buffer_bytes=10 * EVENT_BYTES)
def test_the_engine_pauses_when_what_waits_takes_too_much_memory(rig: Rig) -> None:
    rig.add("a", 100)
    until(lambda: rig.thread.unpublished == 10)
    time.sleep(0.05)
    assert rig.thread.unpublished == 10
    rig.collect()
    until(lambda: rig.thread.unpublished == 10)
    until(rig.hears_the_end)
    assert rig.indices("a") == list(range(100))


@buffer(buffer_tokens=None)
def test_an_engine_that_pauses_by_itself_can_see_how_many_wait_and_what_they_take(rig: Rig) -> None:
    """As among ranks in lock-step, where the thread must not pause: the engine goes on serving the others' rows."""
    rig.add("a", 10)
    until(lambda: rig.thread.unpublished == 10)
    bounds = [(11, 11 * EVENT_BYTES), (10, 11 * EVENT_BYTES), (11, 10 * EVENT_BYTES)]
    assert [rig.thread.has_room(*each) for each in bounds] == [True, False, False]
    rig.thread.published(rig.thread.take(1000, 1 << 30)[:1])
    assert [rig.thread.has_room(*each) for each in bounds] == [True, True, True]


def test_a_held_engine_makes_no_step_but_hears_stops_and_goes_on_at_once(rig: Rig) -> None:
    rig.thread.hold(True)
    rig.add("a", 10)
    rig.add("b", 10)
    rig.stop("b")
    until(lambda: rig.engine.cancelled)
    time.sleep(0.05)
    assert (rig.engine.steps, rig.thread.has_room(10, 1 << 30)) == (0, False)
    rig.thread.hold(False)
    until(lambda: rig.thread.unpublished == 10)
    assert [event.request_id for event in rig.collect()] == ["a"] * 10


@buffer(buffer_tokens=None)
def test_an_engine_that_pauses_by_itself_is_not_held_by_the_thread(rig: Rig) -> None:
    rig.thread.hold(True)
    rig.add("a", 10)
    until(lambda: rig.thread.unpublished == 10)
    assert not rig.thread.has_room(11, 1 << 30)


def test_the_engine_makes_no_more_while_a_taking_left_some(rig: Rig) -> None:
    """What it made would wait for as long again; while none is taken, as in an outage of Redis, it goes on."""
    rig.engine.gate.clear()
    for name in "abcd":
        rig.add(name, 50)
    rig.engine.gate.set()
    until(lambda: rig.thread.unpublished == 200)
    rig.add("e", 50)
    until(lambda: rig.thread.unpublished == 250)
    assert len(rig.collect(100)) == 100
    steps = rig.engine.steps
    rig.add("f", 50)
    time.sleep(0.05)
    assert (rig.engine.steps, rig.thread.has_room(1000, 1 << 30)) == (steps, False)
    assert len(rig.collect(150)) == 150
    until(lambda: rig.thread.unpublished == 50)
    assert [event.request_id for event in rig.collect()] == ["f"] * 50


def test_what_is_taken_at_once_is_bounded_in_bytes_too(rig: Rig) -> None:
    rig.add("a", 10)
    until(lambda: rig.thread.unpublished == 10)
    taken = [rig.thread.take(100, nbytes) for nbytes in (3 * EVENT_BYTES, 1, 4 * EVENT_BYTES + 1, 1 << 30, 1)]
    assert [[event.index for event in events] for events in taken] == [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], []]


def test_log_probabilities_count_by_their_number() -> None:
    top = [(number, -1.0) for number in range(20)]
    plain = TokenEvent(request_id="r", attempt=1, index=0, token_id=1)
    scored = TokenEvent(request_id="r", attempt=1, index=1, token_id=1, logprob=TokenLogprob(-1.0, top))
    prompt = TokenEvent(request_id="r", attempt=1, index=0, scores=PromptScores(start=1, width=0, logprobs=bytes(4000)))
    assert event_bytes([plain, scored, prompt]) == 3 * EVENT_BYTES + 20 * SCORE_BYTES + 4000
