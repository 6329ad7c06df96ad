"""What a running server leaves for other commands of its user to find it by, and which records are not believed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
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
    assert with_local_server({"namespace": "other"})[0].namespace == "other"
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
        "Several servers run on this machine. Choose one by its options:",
        f"  pocket at http://127.0.0.1:8000: --redis-url {SOCKET}",
        "  qwen at http://127.0.0.1:8001: --redis-url redis://user:***@db/0 --namespace mine",
    ]


def test_none_is_found_after_its_end_or_before_its_redis_answers(serve: Serve) -> None:
    with RunFolder():
        assert local_servers() == []
    folder = serve()
    assert len(local_servers()) == 1
    folder.__exit__()
    assert local_servers() == []
    assert with_local_server({}) == (Settings(), None)


def test_the_record_of_a_dead_process_is_removed(serve: Serve) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    folder = serve()
    left = folder.path.rename(folder.path.with_name(f"expertmesh-serve-{dead.pid}-abc"))
    assert local_servers() == []
    assert not left.exists()


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
