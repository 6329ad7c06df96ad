"""`expertmesh ray` beside a cluster: what of the user's settings goes on, and what is said when it cannot."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testkit.pocket.answers import POCKET
from testkit.processes.servers import free_port

pytest.importorskip("ray", reason="Ray has no wheel for this Python")

import ray

from services.config import layer
from services.errors import ConfigError, PortInUse, RayUnavailable
from services.ray import cluster
from services.ray.arguments import read
from services.ray.cluster import Place
from services.ray.command import main, settings_given
from services.ray.connection import connected

MODEL = str(POCKET / "model")


def place(**others: Any) -> Place:
    return Place(**{"address": None, "name": "pocket", "host": "127.0.0.1", "port": free_port()} | others)


def test_the_content_of_the_file_with_the_redis_url_stays_in_it(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:very-secret@redis:6379/0\n")
    found = settings_given(layer({"model": MODEL, "auth": "off", "redis_url_file": str(file)}))
    assert "very-secret" not in json.dumps(found)
    assert read({"settings": found}).checked_settings().redis_url == "redis://:very-secret@redis:6379/0"


def test_paths_are_those_that_processes_in_other_folders_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "keys.json").write_text('{"keys": []}')
    monkeypatch.chdir(tmp_path)
    found = settings_given(layer({"model": "model", "api_keys_file": "keys.json"}))
    assert found == {"model": f"{tmp_path}/model", "api_keys_file": f"{tmp_path}/keys.json"}
    assert settings_given(layer({"model": "some/model"})) == {"model": "some/model"}, "one of the hub"


def test_settings_of_each_process_are_refused_as_the_user_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 9000\n")
    with pytest.raises(ConfigError, match=f"port in {file} does not apply to `expertmesh ray up`") as refused:
        main(["up", MODEL, "--config", str(file)])
    assert "--http-port" in str(refused.value)
    monkeypatch.setenv("EXPERTMESH_API_KEY", "sk-12345678")
    with pytest.raises(ConfigError, match="EXPERTMESH_API_KEY does not apply") as refused:
        main(["up", MODEL])
    assert "expertmesh keys" in str(refused.value)


@pytest.mark.parametrize("words", [["--address", "ADDRESS"], []])
def test_a_dead_cluster_is_named_at_once(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", _no_cluster)  # the real one tries for minutes
    with pytest.raises(RayUnavailable, match=f"Nobody listens at {address}"):
        main(["status", *(address if word == "ADDRESS" else word for word in words)])


def test_without_a_cluster_a_command_about_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", _no_cluster)
    with pytest.raises(RayUnavailable, match="No Ray cluster answers") as refused, connected(None):
        pass
    assert "ray start --head" in str(refused.value)


def test_another_version_of_ray_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.61.0. This process: Ray: 2.60.0")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RayUnavailable, match=r"2\.61\.0.*2\.60\.0"):
        main(["status"])


def _no_cluster(**_: Any) -> None:
    raise ConnectionError("none runs")


def test_a_taken_port_is_named_before_a_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", _no_cluster)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port}") as refused:
            cluster.up({"settings": {"model": MODEL, "auth": "off"}}, place(port=port))
    assert "--http-port" in str(refused.value)


def test_a_cluster_of_its_own_has_room_for_all_that_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": MODEL, "auth": "off", "layout": "disaggregated", "workers": 3, "expert_workers": 2}
    arguments = read({"settings": settings, "experts": {"cpus": 2}, "gateways": {"cpus": 0.5}})
    checked = arguments.checked_settings()
    assert cluster.reserved_cpus(arguments, checked) == pytest.approx(0.5 + 2 * 0.1 + 3 * 1 + 2 * 2)
    cores: list[int] = []
    for machine in (2, 64):
        monkeypatch.setattr("os.cpu_count", lambda machine=machine: machine)
        cores.append(cluster._before_start(arguments, checked, place()))
    assert cores == [8, 64]


@pytest.fixture
def proxies() -> Iterator[Any]:
    """What listens where Serve's proxies should: ``says`` maps paths to JSON; others are not found."""
    says: dict[str, Any] = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in says else 404)
            self.end_headers()
            self.wfile.write(json.dumps(says.get(self.path)).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", says
        server.shutdown()
        serving.join()


def test_only_the_application_itself_counts_as_ready(proxies: Any) -> None:
    url, says = proxies
    answers = partial(cluster._answers, url, place(route_prefix="/llm"))
    says |= {"/llm/ready": {}, "/ready": {}}
    assert not answers(), "another server"
    says["/-/routes"] = {"/": "pocket", "/llm": "other"}
    assert not answers(), "another application"
    says["/-/routes"] = {"/llm": "pocket"}
    assert answers()
    del says["/llm/ready"]
    assert not answers(), "it has no worker yet"


def test_a_controller_that_starts_again_is_waited_for(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def away(*_: Any) -> Any:
        raise ray.exceptions.ActorUnavailableError("it starts again", None)

    monkeypatch.setattr(cluster, "_NOTE_S", 0.0)
    monkeypatch.setattr(cluster, "_POLL_S", 0.0)
    monkeypatch.setattr(cluster, "_overview", away)
    asked = iter([away, away, lambda: True])
    assert cluster._wait(lambda: next(asked)(), "pocket", threading.Event())
    assert "waiting for: the controller" in capsys.readouterr().out


def test_the_first_signal_ends_the_wait() -> None:
    stop = threading.Event()
    stop.set()
    assert not cluster._wait(lambda: True, "pocket", stop)


def test_gateways_without_room_are_said_in_serves_words(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = SimpleNamespace(status="UPDATING", replica_states={"STARTING": 1}, message="No room for {'CPU': 0.5}.")
    application = SimpleNamespace(deployments={"Gateway": gateway})
    status = SimpleNamespace(applications={"pocket": application})
    monkeypatch.setattr(cluster.serve, "status", lambda: status)
    assert cluster._gateways("pocket") == "gateways: 1 starting. No room for {'CPU': 0.5}."
    gateway.status = "HEALTHY"
    assert cluster._gateways("pocket") == ""


def test_why_an_application_failed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "The application first of this cluster serves in namespace expertmesh of this Redis."
    wall = "\n".join(
        [
            "The deployment failed to start 3 times in a row. Error:",
            "ray::ServeReplica:second:Gateway.initialize_and_get_metadata() (pid=1, ip=10.0.0.1)",
            "RuntimeError: Traceback (most recent call last):",
            '  File "services/ray/controller.py", line 169, in _check_alone',
            "    raise ConfigError(",
            f"services.errors.ConfigError: {reason}",
        ]
    )
    gateway = SimpleNamespace(message=wall)
    failed = SimpleNamespace(status="DEPLOY_FAILED", message="Failed to update: Gateway.", deployments={"G": gateway})
    monkeypatch.setattr(cluster.serve, "status", lambda: SimpleNamespace(applications={"second": failed}))
    with pytest.raises(ConfigError) as refused:
        cluster._runs("second")
    assert refused.value.message == (
        f"The application second could not be deployed: {reason} Failed to update: Gateway."
    )
