"""One completion from a server that is scripted, asked for as `helm test` does."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.cli.ask import NoAnswer, main
from services.config import Settings
from services.errors import ConfigError
from services.runtime.local_servers import announce
from services.runtime.run_folder import RunFolder


class Scripted(HTTPServer):
    """Answers with ``events``; keeps what it was sent."""

    events: list[str]
    bodies: list[dict[str, object]]
    paths: list[str]
    keys: list[str | None]
    closed: bool = False


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.server.paths.append(self.path)
        if self.server.closed:
            return self._send('{"error": {"message": "no key"}}', 401)
        return self._send(json.dumps({"data": [{"id": "pocket"}]}))

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send("".join(f"data: {event}\n\n" for event in self.server.events), 200 if self.server.events else 503)

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing: the output is the test's."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted(("127.0.0.1", 0), _Handler) as server:
        server.bodies, server.keys, server.paths, server.events = [], [], [], []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Scripted) -> int:
    return main(["--url", f"http://127.0.0.1:{server.server_port}", "--max-tokens", "3", "define: moor"])


def test_the_text_is_printed(
    server: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "em-1")
    server.events = ['{"choices": [{"text": "a "}]}', '{"choices": [{"text": "heath"}]}', "[DONE]"]
    assert ask(server) == 0
    assert capsys.readouterr().out == "a heath\n"
    assert server.keys == ["Bearer em-1"]
    assert (server.bodies[0]["model"], server.bodies[0]["max_tokens"]) == ("pocket", 3)


def test_a_chat_message_is_answered(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.events = [json.dumps({"choices": [{"delta": delta}]}) for delta in ({"content": "a moor"}, {})]
    assert main(["--url", f"http://127.0.0.1:{server.server_port}", "--chat", "define: moor"]) == 0
    assert capsys.readouterr().out == "a moor\n"
    assert server.paths[1] == "/v1/chat/completions"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "define: moor"}]


def test_the_prompt_may_come_from_the_standard_input(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("define: moor\n"))
    server.events = ['{"choices": [{"text": "a heath"}]}']
    assert main(["--url", f"http://127.0.0.1:{server.server_port}", "-"]) == 0
    assert server.bodies[0]["prompt"] == "define: moor\n"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{}/v1", "http://127.0.0.1:{}/v1/", "127.0.0.1:{}", "127.0.0.1:{}/v1"]
)
def test_the_address_may_be_what_other_clients_and_serve_write(server: Scripted, url: str) -> None:
    server.events = ['{"choices": [{"text": "a"}]}']
    assert main(["--url", url.format(server.server_port), "x"]) == 0
    assert server.paths == ["/v1/models", "/v1/completions"]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "answers 503"),
        (["[DONE]"], "without a token"),
        (['{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', "[DONE]"], "without a token"),
        (['{"choices": [{"text": "a"}]}', '{"error": {"message": "gone"}}'], "gone"),
    ],
)
def test_no_completion_is_a_failure(server: Scripted, events: list[str], says: str) -> None:
    server.events = events
    with pytest.raises(NoAnswer, match=says):
        ask(server)


def test_a_key_that_is_not_given_is_asked_for(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    server.closed = True
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(NoAnswer, match="OPENAI_API_KEY is not set") as refused:
        ask(server)
    assert "auth.plainKey" in str(refused.value)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(NoAnswer, match=r"answers 401: no key"):
        ask(server)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NoAnswer, match=r"does not answer: .*[^.]\.$"):
        main(["--url", "http://127.0.0.1:9", "x"])
    with pytest.raises(NoAnswer, match=r"does not answer: .*[^.]\.$"):
        main(["--url", "ftp://127.0.0.1", "x"])


@pytest.mark.usefixtures("temporary")
def test_the_only_server_of_this_machine_is_asked(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.events = ['{"choices": [{"text": "a heath"}]}', "[DONE]"]
    settings = Settings(model=Path("/models/pocket"))
    with RunFolder() as folder:
        announce(folder, settings, url=f"http://127.0.0.1:{server.server_port}", redis_url="redis://db/0")
        assert main(["define: moor"]) == 0
        assert capsys.readouterr().out == "a heath\n"
        with RunFolder() as second:
            announce(second, settings, url="http://127.0.0.1:9", redis_url="redis://db/1")
            with pytest.raises(ConfigError) as refused:
                main(["define: moor"])
    assert str(server.server_port) in str(refused.value)
    assert "http://127.0.0.1:9." in str(refused.value)
