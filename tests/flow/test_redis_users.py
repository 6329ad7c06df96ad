"""Every role in a process of its own, logged in as its user, which may do nothing else: a deployment that serves."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from testkit.processes.servers import Bench, Server, bench, flags, free_port
from testkit.queue.redis_server import LOADS, NAMESPACE, write_users

from services.queue.embedded import find_redis_server

LAYOUTS = {
    "experts disaggregated": ("scheduler", "gateway", "attention", "experts"),
    "seats": ("scheduler", "gateway", "workers"),
}


class Guarded:
    """A Redis with users, and the roles around it."""

    def __init__(self, stage: Bench, model: Path) -> None:
        self._stage = stage
        self._port = free_port()
        self._model = model
        self.secret = stage.folder / "secret"
        self.secret.write_text(secrets.token_hex(16))
        users = write_users(stage.folder, str(find_redis_server()))
        text = users.read_text().replace("user default on nopass ~* &* +@all", "user default off")
        users.write_text("".join(line for line in text.splitlines(keepends=True) if f"{LOADS} on" not in line))
        place = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(stage.folder), "--save", ""]
        stage.start("redis", [str(find_redis_server()), *place, "--aclfile", str(users)])

    def url(self, role: str) -> str:
        return f"redis://{role}:{role}@127.0.0.1:{self._port}/0"

    def start(self, layout: str) -> Server:
        port = free_port()
        fabric = {"model": self._model, "dtype": "float32", "device": "cpu", "fabric_secret_file": self.secret}
        options: dict[str, dict[str, object]] = {
            "scheduler": {},
            "gateway": {"port": port, "model": self._model, "served_model_name": "tiny"},
            "attention": {"layout": "disaggregated", "kv_blocks": 256, **fabric},
            "experts": fabric,
            "workers": {"layout": "colocated", "workers": 2, "kv_blocks": 256, **fabric},
        }
        for role in LAYOUTS[layout]:
            said = flags(redis_url=self.url(role), namespace=NAMESPACE, **options[role])
            proc = self._stage.start(role, [sys.executable, "-m", "services", role, *said])
        return Server(url=f"http://127.0.0.1:{port}", proc=proc)

    def log(self) -> str:
        return "".join(proc.log() for proc in self._stage.procs)

    def cli(self, role: str, *words: str) -> subprocess.CompletedProcess[str]:
        place = flags(redis_url=self.url(role), namespace=NAMESPACE)
        command = [sys.executable, "-m", "services", *words, *place]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module", params=LAYOUTS)
def guarded(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Guarded, Server]]:
    with bench(tmp_path_factory.mktemp("users")) as stage:
        made = Guarded(stage, tiny)
        server = made.start(request.param)
        server.wait_ready()
        yield made, server


def test_a_deployment_of_users_serves(guarded: tuple[Guarded, Server]) -> None:
    made, server = guarded
    for key in ("a", "a", "b"):
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "n": 2, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Idempotency-Key": key}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    assert "does not let this user" not in made.log()


def test_people_look_as_the_scheduler_and_keep_keys_as_operator(guarded: tuple[Guarded, Server]) -> None:
    made, _ = guarded
    for role in ("scheduler", "operator"):
        assert made.cli(role, "status", "--kubernetes", "off").returncode == 0
        top = made.cli(role, "top", "--once", "--interval", "0.1")
        assert (top.returncode, "does not let" in top.stdout) == (0, False), top.stdout
        assert made.cli(role, "queue", "list").stdout == "no dead letters\n"
    assert made.cli("operator", "keys", "create", "alice").returncode == 0
    assert "alice" in made.cli("operator", "keys", "list").stdout
    refused = made.cli("scheduler", "keys", "create", "mallory")
    assert refused.returncode == 1
    assert "does not let this user do that" in refused.stderr
