"""What `expertmesh demo` decides before it serves, and what it prints."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.config import Layered, Settings, load_layered
from services.demo import tour
from services.errors import ExpertMeshError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that would have been served."""
    seen: list[Settings] = []

    def serve(settings: Settings, **_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(tour, "serve", serve)
    return seen


def test_it_serves_the_pocket_model_quietly(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "POCKET_MODEL", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert tour.run_demo(load_layered([])) == 0
    assert (served[0].model, served[0].model_name, served[0].log_level) == (tmp_path, "pocket-moe", "warning")
    assert tour.prompt_for(served[0].model).startswith("define: ")


def test_without_it_a_random_one_is_made_once(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tour, "POCKET_MODEL", tmp_path / "absent")
    assert tour.run_demo(load_layered([])) == 0
    written = (tmp_path / tour.RANDOM_MODEL / "config.json").stat()
    tour.run_demo(load_layered([]))
    assert (tmp_path / tour.RANDOM_MODEL / "config.json").stat().st_mtime_ns == written.st_mtime_ns
    assert capsys.readouterr().out.count("random weights") == 1
    assert served[0].model == tour.RANDOM_MODEL
    assert not tour.prompt_for(served[0].model).startswith("define: ")


def test_what_the_user_says_holds(served: list[Settings]) -> None:
    tour.run_demo(load_layered(["--model", "mine", "--port", "0", "--log-level", "info"]))
    assert (served[0].model, served[0].port, served[0].log_level) == (Path("mine"), 0, "info")


def test_a_taken_port_is_evaded_where_nobody_asked_for_it(served: list[Settings]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        usual = Layered(settings=Settings(model=Path("mine"), port=port), origins={})
        tour.run_demo(usual)
    assert served[0].port not in (0, port)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets each request get this text."""
    client = httpx.AsyncClient

    def always(text: str) -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
        monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client(base_url="http://demo", transport=transport))

    return always


async def test_it_prints_the_completion_as_it_streams(
    answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = (f"data: {json.dumps({'choices': [{'text': text}]})}\n\n" for text in ("(noun)", " A tree."))
    answers("".join(chunks) + "data: [DONE]\n\n")
    await tour._stream_completion("http://demo", None, "m", "define: oak\n")
    assert capsys.readouterr().out.startswith("\ndefine: oak\n(noun) A tree.\n\nTry it yourself:")


@pytest.mark.parametrize("frame", ["", "data: "])
async def test_a_refusal_ends_it_with_what_the_server_said(answers: Callable[[str], None], frame: str) -> None:
    answers(frame + json.dumps({"error": {"message": "An API key is needed."}}))
    with pytest.raises(ExpertMeshError, match="An API key is needed"):
        await tour._stream_completion("http://demo", None, "m", "define: oak\n")


def test_the_invitation_is_a_command_that_works() -> None:
    text = tour.invitation("http://127.0.0.1:9", "m", "define: x\n")
    assert "curl -N http://127.0.0.1:9/v1/completions" in text
    assert json.loads(text.split("-d '")[1].split("'")[0])["model"] == "m"
