"""Follows one kind of workload: list, then watch, on a thread of its own, for as long as the process lives.

A watch that the API server ends is resumed where it ended. After anything else (a version too old, a broken connection,
a refused token) everything is listed again, by a new connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from services.errors import KubernetesUnavailable, WatchExpired
from services.queue.backoff import Backoff
from services.scheduler.kube.api import Api, Json, Kind
from services.scheduler.kube.workloads import Workload, workload

STALE_S = 60.0
"""What was known is dropped after this time without an answer. A watch that ends is one, see ``WATCH_S``."""
MAX_PAUSE_S = 5.0
"""Longest pause between two attempts while the API server is away."""
BRIEF_S = 1.0
"""A watch that ends sooner was cut by something in between."""

log = logging.getLogger(__name__)


class Follower:
    """Knows the workloads of ``kind``. ``connect`` makes a connection, and a new one after each failure."""

    def __init__(
        self,
        kind: Kind,
        connect: Callable[[], Api],
        *,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind, self._connect, self._stale_s, self._clock = kind, connect, stale_s, clock
        self._lock = threading.Lock()
        self._found: dict[str, Workload] = {}
        self._answered_at: float | None = None
        self._stopped = threading.Event()
        self._api: Api | None = None
        self._backoff = Backoff(max_s=MAX_PAUSE_S)
        self._away = False
        self._thread = threading.Thread(target=self._run, name=f"kube-{kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. A connection that is being made may take a little longer; it keeps no process alive."""
        self._stopped.set()
        if self._api is not None:
            self._api.close()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    @property
    def workloads(self) -> Mapping[str, Workload] | None:
        """Workloads by name. None: they are not known, or not any more."""
        with self._lock:
            at = self._answered_at
            return dict(self._found) if at is not None and self._clock() - at < self._stale_s else None

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._api = self._connect()
                self._follow(self._api)
            except WatchExpired:
                self._stopped.wait(self._backoff.failed())
            except Exception as error:  # noqa: BLE001  what is known grows stale, and is asked for again
                self._failed(error)

    def _follow(self, api: Api) -> None:
        items, version = api.list(self._kind)
        with self._lock:
            self._found = {each.name: each for item in items if (each := workload(item)) is not None}
        self._answered()
        while not self._stopped.is_set():
            began = self._clock()
            for event in api.watch(self._kind, version):
                version = self._take(event)
            self._answered()
            if self._clock() < began + BRIEF_S:
                self._stopped.wait(self._backoff.failed())
            else:
                self._backoff.succeeded()

    def _take(self, event: Json) -> str:
        """Note ``event``. Returns the version up to which everything is known."""
        item = event["object"]
        name = item["metadata"].get("name")
        if event["type"] != "BOOKMARK":
            each = None if event["type"] == "DELETED" else workload(item)
            with self._lock:
                self._found.pop(name, None)
                if each is not None:
                    self._found[name] = each
        self._answered()
        return str(item["metadata"]["resourceVersion"])

    def _answered(self) -> None:
        with self._lock:
            self._answered_at = self._clock()
        if self._away:
            self._away = False
            log.info("%s: the Kubernetes API server answers again", self._kind)

    def _failed(self, error: Exception) -> None:
        if self._stopped.is_set():
            return
        if not self._away:
            self._away = True
            said = error.message if isinstance(error, KubernetesUnavailable) else repr(error)
            log.warning("cannot watch %s, so replica counts are unknown: %s", self._kind, said)
        self._stopped.wait(self._backoff.failed())
