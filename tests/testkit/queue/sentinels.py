"""A primary, its replica and a Sentinel that watches them, as real processes with a password."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from testkit.processes.servers import free_port

PASSWORD, SENTINEL_PASSWORD, NAME = "of-redis", "of-sentinel", "mymaster"
_DOWN_AFTER_MS = 1000


class Watched:
    """``url`` names a Sentinel that is not there before the one that is."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._folder = Path(tempfile.mkdtemp(prefix="emw"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.primary, self.replica, self.sentinel = free_port(), free_port(), free_port()
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel}"
        self.url = f"redis+sentinel://:{PASSWORD}@{hosts}/{NAME}/0?sentinel_password={SENTINEL_PASSWORD}"

    def start(self) -> None:
        login = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
        self._run("primary", "--port", str(self.primary), *login)
        self._run("replica", "--port", str(self.replica), *login, "--replicaof", "127.0.0.1", str(self.primary))
        for port in (self.primary, self.replica):
            _await_answer(port, PASSWORD)
        rules = {
            f"sentinel monitor {NAME} 127.0.0.1": f"{self.primary} 1",
            f"sentinel auth-pass {NAME}": PASSWORD,
            f"sentinel down-after-milliseconds {NAME}": str(_DOWN_AFTER_MS),
            f"sentinel failover-timeout {NAME}": "10000",
            "requirepass": SENTINEL_PASSWORD,
            "port": str(self.sentinel),
        }
        file = self._folder / "sentinel.conf"
        file.write_text("".join(f"{rule} {value}\n" for rule, value in rules.items()))
        self._run("sentinel", "--sentinel", before=[str(file)])
        with _await_answer(self.sentinel, SENTINEL_PASSWORD) as client:
            deadline = time.monotonic() + 30
            while not client.execute_command("SENTINEL", "REPLICAS", NAME):
                assert time.monotonic() < deadline, "the Sentinel does not find the replica"
                time.sleep(0.1)

    def kill_primary(self) -> None:
        """Kill -9, once the replica has all writes that were acknowledged.

        A pause of writes holds the Sentinel's PUBLISH back, and what it asks behind that on the same connection: it
        would call the primary down meanwhile, and make one of the replica however much that has.
        """
        with redis.Redis(port=self.primary, password=PASSWORD) as client:
            self._judge_after(600_000)
            client.client_pause(90_000, all=False)  # writes alone
            deadline = time.monotonic() + 60
            while _behind(client.info("replication")):
                assert time.monotonic() < deadline, "the replica does not catch up"
                time.sleep(0.05)
        self.lose_primary()
        self._judge_after(_DOWN_AFTER_MS)

    def cut_replica(self) -> None:
        """From now on the replica gets no more writes, while the primary goes on to acknowledge them."""
        with redis.Redis(port=self.replica, password=PASSWORD) as replica:
            replica.config_set("masterauth", "wrong")
            with redis.Redis(port=self.primary, password=PASSWORD) as primary:
                primary.client_kill_filter(_type="replica")
            deadline = time.monotonic() + 30
            while replica.info("replication")["master_link_status"] == "up":
                assert time.monotonic() < deadline, "the replica keeps its link"
                time.sleep(0.02)

    def lose_primary(self) -> None:
        """Kill -9, whatever the replica has."""
        self._processes[0].kill()
        self._processes[0].wait()

    def _judge_after(self, milliseconds: int) -> None:
        """So long the Sentinel waits for an answer until it calls a server down."""
        with redis.Redis(port=self.sentinel, password=SENTINEL_PASSWORD) as sentinel:
            sentinel.execute_command("SENTINEL", "SET", NAME, "down-after-milliseconds", milliseconds)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, name: str, *words: str, before: list[str] | None = None) -> None:
        folder = self._folder / name
        folder.mkdir()
        options = [*words, "--save", ""] if before is None else [*words]
        command = [self._binary, *(before or []), *options, "--dir", str(folder), "--bind", "127.0.0.1"]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def _behind(found: dict[str, Any]) -> bool:
    """Whether the replica has not reported yet that it has everything."""
    return "slave0" not in found or bool(found["slave0"]["offset"] < found["master_repl_offset"])


def _await_answer(port: int, password: str) -> redis.Redis:
    client = redis.Redis(port=port, password=password)
    deadline = time.monotonic() + 30
    while True:
        with suppress(redis.RedisError):
            client.ping()
            return client
        assert time.monotonic() < deadline, f"nobody answers on port {port}"
        time.sleep(0.05)


@contextmanager
def watched_redis(binary: str) -> Iterator[Watched]:
    """A :class:`Watched` that answers, for the length of the block."""
    watched = Watched(binary)
    try:
        watched.start()
        yield watched
    finally:
        watched.close()
