"""What a running server leaves for other commands of its user to find it by, and which records are not believed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.config import Settings
from services.errors import ConfigError
from services.runtime.local_servers import announce, local_servers, with_local_server
from services.runtime.run_folder import RunFolder

SOCKET = "unix:///run/redis.sock"
Serve = Callable[..., RunFolder]

pytestmark = pytest.mark.usefixtures("temporary")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Leaves the record of a server, until the test ends."""
    with ExitStack() as running:

        def served(port: int = 8000, redis_url: str = SOCKET, **settings: Any) -> RunFolder:
            folder = running.enter_context(RunFolder())
            values = Settings(model=Path("/models/pocket"), **settings)
            announce(folder, values, url=f"http://127.0.0.1:{port}", redis_url=redis_url)
            return folder

        yield served


def test_the_only_server_is_the_one_that_is_meant(serve: Serve) -> None:
    serve(namespace="mine")
    settings, server = with_local_server({})
    assert (settings.redis_url, settings.namespace, settings.api_keys_file) == (SOCKET, "mine", None)
    assert server is not None
    assert (server.url, server.model_name) == ("http://127.0.0.1:8000", "pocket")


def test_what_is_given_counts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(namespace="mine")
    assert with_local_server({"api_keys_file": "keys.yaml"})[0].api_keys_file == Path("keys.yaml")
    given = {"redis_url": "redis://elsewhere/0"}
    settings, server = with_local_server(given)
    assert (settings.redis_url, settings.namespace, server) == ("redis://elsewhere/0", "expertmesh", None)
    monkeypatch.setenv("EXPERTMESH_REDIS_URL", "redis://elsewhere/1")
    assert with_local_server({})[0].redis_url == "redis://elsewhere/1"


def test_files_of_the_server_are_found_from_any_folder(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password in the file of the URL is not copied into the record."""
    (tmp_path / "url").write_text("redis://user:secret@db/0")
    monkeypatch.chdir(tmp_path)
    url = "redis://user:secret@db/0"
    folder = serve(redis_url_file=Path("url"), redis_url=url, api_keys_file=Path("keys.yaml"))
    assert "secret" not in (folder.path / "server.json").read_text()
    monkeypatch.chdir("/")
    settings, _ = with_local_server({})
    assert (settings.redis_url, settings.api_keys_file) == (url, tmp_path / "keys.yaml")


def test_of_several_one_has_to_be_chosen(serve: Serve) -> None:
    serve(8001, redis_url="redis://user:secret@db/0", namespace="mine", served_model_name="qwen")
    serve(8000)
    with pytest.raises(ConfigError) as caught:
        with_local_server({})
    assert caught.value.message.splitlines() == [
        "Several servers run on this machine. Choose one:",
        "  pocket in namespace expertmesh: --url http://127.0.0.1:8000",
        "  qwen in namespace mine: --url http://127.0.0.1:8001",
    ]
    for url in ("http://127.0.0.1:8001", "127.0.0.1:8001/v1"):
        settings, server = with_local_server({"url": url})
        assert (settings.redis_url, settings.namespace) == ("redis://user:secret@db/0", "mine")
        assert server is not None
        assert server.model_name == "qwen"
    with pytest.raises(ConfigError, match=r"No server on this machine matches the options\.\n  pocket .*\n  qwen"):
        with_local_server({"url": "http://127.0.0.1:8002"})


def test_an_address_counts_before_the_environment(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment may be about another deployment. Options of the command line may not."""
    serve()
    for name, value in (("REDIS_URL", "redis://db/0"), ("NAMESPACE", "other"), ("API_KEYS_FILE", "keys.yaml")):
        monkeypatch.setenv(f"EXPERTMESH_{name}", value)
    url = {"url": "http://127.0.0.1:8000"}
    settings, _ = with_local_server(url)
    assert (settings.redis_url, settings.namespace, settings.api_keys_file) == (SOCKET, "expertmesh", None)
    settings, _ = with_local_server(url | {"api_keys_file": str(tmp_path / "mine.yaml")})
    assert settings.api_keys_file == tmp_path / "mine.yaml"
    for other in ({"namespace": "other"}, {"redis_url": "redis://db/0"}):
        with pytest.raises(ConfigError, match="matches the options"):
            with_local_server(url | other)


def test_a_namespace_that_is_given_chooses(serve: Serve) -> None:
    serve(8001, redis_url="redis://db/1", namespace="mine")
    serve(8002, redis_url="redis://db/2", namespace="yours")
    settings, server = with_local_server({"namespace": "yours"})
    assert (settings.redis_url, server and server.url) == ("redis://db/2", "http://127.0.0.1:8002")
    settings, server = with_local_server({"namespace": "other"})
    assert (settings.redis_url, settings.namespace, server) == (None, "other", None)


@pytest.mark.parametrize(
    ("of_server", "given"),
    [
        (SOCKET, SOCKET),
        (SOCKET, f"{SOCKET}?db=0"),
        ("redis://gateway:a@db:6379/0", "redis://operator:b@db"),
        ("redis://db/2", "redis://db?db=2"),
        ("redis+sentinel://a,b:26379/main/0", "redis+sentinel://u:p@b,a/main"),
    ],
)
def test_the_redis_of_a_server_means_the_server(serve: Serve, tmp_path: Path, of_server: str, given: str) -> None:
    serve(8001, redis_url="redis://elsewhere/0")
    file = tmp_path / "url"
    file.write_text(of_server)
    for values in ({}, {"redis_url_file": file}):
        folder = serve(redis_url=of_server, namespace="mine", api_keys_file=tmp_path / "keys.yaml", **values)
        settings, server = with_local_server({"redis_url": given})
        assert (settings.redis_url, settings.redis_url_file) == (given, None)
        assert (settings.namespace, settings.api_keys_file) == ("mine", tmp_path / "keys.yaml")
        assert server is not None
        assert server.url == "http://127.0.0.1:8000"
        folder.__exit__()


@pytest.mark.parametrize("given", ["redis://db/1", "redis://db:6380/0", "redis://other/0", "unix:///db/0"])
def test_another_redis_means_no_server(serve: Serve, tmp_path: Path, given: str) -> None:
    serve(redis_url="redis://db/0", api_keys_file=tmp_path / "keys.yaml")
    serve(redis_url="redis://db/0", redis_url_file=tmp_path / "gone")
    settings, server = with_local_server({"redis_url": given})
    assert (settings.redis_url, settings.api_keys_file, server) == (given, None, None)


def test_servers_of_one_deployment_need_no_choice(serve: Serve) -> None:
    serve(8000, redis_url="redis://db/0")
    serve(8001, redis_url="redis://db/0")
    assert with_local_server({})[0].redis_url == "redis://db/0"
    serve(8002, redis_url="redis://db/0", namespace="mine")
    with pytest.raises(ConfigError, match="Several servers"):
        with_local_server({"redis_url": "redis://db/0"})


def test_none_is_found_after_its_end_or_before_its_redis_answers(serve: Serve) -> None:
    with RunFolder():
        assert local_servers() == []
    folder = serve()
    assert len(local_servers()) == 1
    folder.__exit__()
    assert local_servers() == []
    assert with_local_server({}) == (Settings(), None)


@pytest.fixture
def killed(serve: Serve) -> Path:
    """The folder of a server that was killed, next to that of one that runs."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    place = serve().path.name.split("-")[2]
    left = serve().path
    return left.rename(left.with_name(f"expertmesh-serve-{place}-{dead.pid}-abc"))


def test_the_record_of_a_dead_process_is_not_believed_and_goes_with_the_next_start(killed: Path) -> None:
    assert len(local_servers()) == 1
    assert killed.exists(), "commands that look remove nothing"
    with RunFolder():
        assert not killed.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no PID namespaces")
@pytest.mark.parametrize("other", ["container", "host"])
def test_a_server_elsewhere_is_left_alone(killed: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Containers and hosts may share the folder of temporary files, where numbers of processes mean other ones."""
    stat, read = os.stat, Path.read_text

    def _stat(path: Any, **options: Any) -> Any:
        return SimpleNamespace(st_ino=1) if path == "/proc/self/ns/pid" else stat(path, **options)

    def _read(path: Path, *options: Any, **named: Any) -> str:
        return "of another start" if path.name == "boot_id" else read(path, *options, **named)

    if other == "container":
        monkeypatch.setattr(os, "stat", _stat)
    else:
        monkeypatch.setattr(Path, "read_text", _read)
    assert local_servers() == []
    with RunFolder():
        assert killed.exists()


def test_a_record_that_others_can_have_written_is_not_believed(serve: Serve, tmp_path: Path) -> None:
    folder = serve()
    folder.path.chmod(0o777)
    assert local_servers() == []
    folder.path.chmod(0o700)
    real = folder.path.rename(tmp_path / "elsewhere")
    folder.path.symlink_to(real)
    assert local_servers() == []


def test_the_record_of_another_user_is_not_believed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert local_servers() == []


def test_the_record_of_another_release_is_passed_over(serve: Serve) -> None:
    (serve().path / "server.json").write_text('{"from": "a release to come"}')
    assert local_servers() == []
