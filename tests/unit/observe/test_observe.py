"""What `expertmesh observe` starts, whom it scrapes, and its pages. tests/flow has it beside a server."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml
from starlette.testclient import TestClient
from testkit.processes.servers import free_port
from testkit.prometheus import StandIn, dashboard, panel, serving
from testkit.waiting import eventually

from services.config import Settings
from services.dashboards.draw.html import element
from services.dashboards.prometheus import Prometheus
from services.errors import ConfigError, PortInUse, ProgramMissing, StartupError
from services.observe import grafana, prometheus
from services.observe.__main__ import Observer, main
from services.observe.program import Program
from services.observe.targets import Target, Targets, named
from services.observe.web import Pages
from services.runtime.local_servers import LocalServer, announce, local_servers
from services.runtime.run_folder import RunFolder


def test_a_target_is_an_address_or_a_page() -> None:
    assert named("127.0.0.1:8000") == Target(address="127.0.0.1:8000", release="127.0.0.1:8000")
    assert named("http://h:1/v1").path == "/metrics"
    assert named("http://h:1/federate").path == "/federate"
    of_one = [named(f"h:{port}", "mesh").entry()["labels"] for port in (1, 2)]
    assert of_one == [
        {"app_kubernetes_io_instance": "mesh", "__metrics_path__": "/metrics", "pod": f"h:{port}"} for port in (1, 2)
    ], "panels by worker have a line for each"
    for wrong in ("localhost", "https://h:1", "h:port", ":80", "[::1", "user:secret@h:80"):
        with pytest.raises(ConfigError, match=r"no HOST:PORT") as refused:
            named(wrong)
        assert "secret" not in refused.value.message


def test_servers_are_found_when_they_start_and_are_gone_when_they_end(tmp_path: Path) -> None:
    running = [LocalServer(url="http://127.0.0.1:8000", model_name="m", namespace="n")]
    file = tmp_path / "targets.json"
    targets = Targets(file, [named("127.0.0.1:8000"), named("far:9100")], lambda: running)
    assert [target.address for target in targets.refresh()] == ["127.0.0.1:8000", "far:9100"]
    labels = {"app_kubernetes_io_instance": "m:8000", "namespace": "n", "__metrics_path__": "/metrics"}
    assert json.loads(file.read_text())[0] == {"targets": ["127.0.0.1:8000"], "labels": labels}
    file.unlink()
    assert targets.refresh() == []
    assert not file.exists(), "it is written where something has changed"
    running.append(LocalServer(url="http://127.0.0.1:8001", model_name="m", namespace="n", metrics_port=9000))
    assert [target.address for target in targets.refresh()] == ["127.0.0.1:9000"]
    running.clear()
    assert targets.refresh() == [named("127.0.0.1:8000")], "a target that is named stays"
    assert [entry["targets"] for entry in json.loads(file.read_text())] == [["127.0.0.1:8000"], ["far:9100"]]


def test_a_server_says_where_its_metrics_are(temporary: Path) -> None:
    assert temporary.is_dir()
    with RunFolder() as folder:
        announce(folder, Settings(model=Path("m"), metrics_port=9100), url="http://[::1]:8000", redis_url="redis://h/0")
        assert [server.metrics_address for server in local_servers()] == ["[::1]:9100"]


def test_the_configuration_follows_the_file_of_targets(tmp_path: Path) -> None:
    read = yaml.safe_load(prometheus.config(tmp_path / "targets.json", [tmp_path / "rules.yaml"]))
    assert read["rule_files"] == [str(tmp_path / "rules.yaml")]
    [scrape] = read["scrape_configs"]
    assert scrape["file_sd_configs"] == [{"files": [str(tmp_path / "targets.json")], "refresh_interval": "2s"}]
    assert prometheus.RULES.is_file()


def test_what_prometheus_may_take_of_the_disk_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prometheus").write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv)\nraise SystemExit(3)")
    (tmp_path / "prometheus").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--max-data", "512MB"]) == StartupError.exit_code
    assert "--storage.tsdb.retention.size=512MB" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Write it as in --max-data 2GB"):
        main(["--max-data", "2 gigabytes"])


def test_without_prometheus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramMissing, match="apt install prometheus"):
        prometheus.find()
    assert grafana.find() is None
    assert main([]) == ProgramMissing.exit_code


def script(folder: Path, name: str, body: str) -> Path:
    """A program of Python on PATH."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{body}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


ANSWERS = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"words": sys.argv[1:], "environment": dict(os.environ)}).encode())
    def log_message(self, *_): pass
port = int(os.environ.get("GF_SERVER_HTTP_PORT") or sys.argv[1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_program_is_well_once_it_answers_and_ends_when_asked(tmp_path: Path) -> None:
    port = free_port()
    command = [str(script(tmp_path, "there", ANSWERS)), str(port)]
    program = Program("It", command, tmp_path / "log", f"http://127.0.0.1:{port}/")
    await program.start()
    assert httpx.get(f"http://127.0.0.1:{port}/").json()["words"] == [str(port)]
    await program.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


async def test_a_program_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = [str(script(tmp_path, "ends", "print('no disk'); raise SystemExit(3)"))]
    program = Program("It", command, tmp_path / "log", f"http://127.0.0.1:{free_port()}/")
    with pytest.raises(StartupError, match="It ended with exit code 3: no disk"):
        await program.start()
    await program.stop()


async def test_grafana_is_given_the_source_and_the_dashboards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "grafana-server", ANSWERS)
    monkeypatch.setenv("PATH", str(tmp_path))
    words, folder, port = grafana.find(), tmp_path / "grafana", free_port()
    assert words == [str(tmp_path / "grafana-server")]
    grafana.provision(folder / "provisioning", "http://127.0.0.1:9", tmp_path / "boards")
    source = yaml.safe_load((folder / "provisioning/datasources/expertmesh.yaml").read_text())["datasources"][0]
    assert (source["type"], source["url"], source["jsonData"]) == (
        "prometheus",
        "http://127.0.0.1:9",
        {"timeInterval": "2s"},
    )
    provider = yaml.safe_load((folder / "provisioning/dashboards/expertmesh.yaml").read_text())["providers"][0]
    assert provider["options"] == {"path": str(tmp_path / "boards")}
    program = grafana.program(words, folder, port)
    await program.start()
    environment = httpx.get(f"http://127.0.0.1:{port}/").json()["environment"]
    await program.stop()
    assert environment["GF_PATHS_PROVISIONING"] == str(folder / "provisioning")
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert len(environment["GF_SECURITY_ADMIN_PASSWORD"]) > 20, "its own would be admin"


async def test_a_port_in_use_is_said_and_nothing_is_left(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = temporary / "pids"
    body = f"import os, sys\nopen({str(pids)!r}, 'w').write(str(os.getpid()))\n"
    body += "sys.argv[1] = next(w for w in sys.argv if 'listen' in w).rpartition(':')[2]\n"
    script(temporary, "prometheus", body + ANSWERS)
    monkeypatch.setenv("PATH", str(temporary))
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    taken = server.sockets[0].getsockname()[1]
    observer = Observer([], data=None, port=taken, prometheus_port=free_port())
    with pytest.raises(PortInUse, match=f"Port {taken}"):
        await observer.run(asyncio.Event())
    server.close()
    await eventually(lambda: not alive(int(pids.read_text())), "the program has ended")
    assert [path.name for path in temporary.glob("expertmesh-*")] == []


def pages(url: str) -> TestClient:
    made = dashboard(
        panel("timeseries", 'a{r="$r"}'), variables=[{"name": "r", "type": "textbox"}], description="about"
    )
    app = Pages(source=Prometheus(url), dashboards={"one": made}, notes=(element("p", "a note"),)).app()
    return TestClient(app, base_url="http://127.0.0.1:9091")


def test_its_pages_list_and_draw_the_dashboards() -> None:
    with serving(StandIn(series=lambda query: [({"role": query}, [(1.0, 1.0)])])) as stand_in:
        client = pages(stand_in.url)
        first = client.get("/")
        assert '<a href="/one">Board</a>: about' in first.text
        assert "<p>a note</p>" in first.text
        drawn = client.get("/one", params={"from": "-1h", "var-r": "<x>"})
        assert drawn.status_code == 200
        assert "a{r=&quot;&lt;x&gt;&quot;}" in drawn.text
        assert '<meta http-equiv="refresh" content="10">' in drawn.text
        assert "var-r=%3Cx%3E" in drawn.text, "links to other dashboards keep the values"
        assert "http-equiv" not in client.get("/one?refresh=off").text
        assert (client.get("/two").status_code, client.get("/one?from=soon").status_code) == (404, 400)
        assert client.get("/", headers={"Host": "evil.test"}).status_code == 400


def test_a_page_says_that_prometheus_is_away_and_comes_again() -> None:
    answer = pages(f"http://127.0.0.1:{free_port()}").get("/one")
    assert answer.status_code == 503
    assert "does not answer" in answer.text
    assert 'http-equiv="refresh"' in answer.text
