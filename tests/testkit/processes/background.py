"""Failures in the background fail the test in which they come: tasks that nobody awaited, and what loops report.

A pytest plugin, which ``tests/conftest.py`` loads; and :func:`ended`, which ends tasks as strictly.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from asyncio.base_events import BaseEventLoop
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from services.runtime.tasks import end_tasks


async def ended(tasks: Iterable[asyncio.Future[Any]], *expected: type[BaseException]) -> None:
    """Cancels ``tasks`` and waits until they are over. Raises what they died of, unless that is ``expected``."""
    tasks = list(tasks)
    await end_tasks(tasks)
    deaths = [task.exception() for task in tasks if not task.cancelled()]
    errors = [error for error in deaths if error is not None and not isinstance(error, expected)]
    if len(errors) > 1:
        raise BaseExceptionGroup("several tasks died", errors)
    if errors:
        raise errors[0]


class Background(logging.Handler):
    """Collects the errors that loops of any kind log, and the tasks whose exceptions nobody has retrieved."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._logged: list[str] = []
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    def emit(self, record: logging.LogRecord) -> None:
        self._logged.append(self.format(record))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Watches all loops of this process; a task that is referenced still has reported nothing to its loop."""
        create = BaseEventLoop.create_task

        def create_task(*args: Any, **options: Any) -> asyncio.Task[Any]:
            task = create(*args, **options)
            self._tasks.add(task)
            return task

        patch.setattr(BaseEventLoop, "create_task", create_task)
        log = logging.getLogger("asyncio")
        patch.setattr(log, "handlers", [*log.handlers, self])

    def failures(self) -> list[str]:
        """Returns what failed since the last call."""
        dead = [task for task in self._tasks if task.done() and task._log_traceback]
        for task in dead:
            task._log_traceback = False  # or the loop would report it, too
        self._tasks = weakref.WeakSet(task for task in self._tasks if not task.done())
        logged, self._logged = self._logged, []
        return [*logged, *(f"nobody retrieved what {task!r} raised" for task in dead)]


_BACKGROUND = pytest.StashKey[Background]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BACKGROUND] = background = Background()
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    background.install(patch)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if failures := item.config.stash[_BACKGROUND].failures():
        pytest.fail("failed in the background:\n" + "\n".join(failures), pytrace=False)
    return result
