"""What ``make abuse`` sees with: limits that hold, clients who notice, bounds that break."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from abuse.attack import Bounds, judge
from abuse.kit.cage import MIB, cage
from abuse.kit.honest import Crowd, Fault, _Choice, _Chunk, _Stream
from abuse.kit.tokens import Answers
from abuse.kit.wire import Dialer
from testkit.pocket.answers import POCKET

CALM: dict[str, Any] = {
    "health": 0.1, "ping": 0.01, "rss_before": 80.0, "rss_after": 90.0, "rss_peak": 100.0, "redis_peak": 6.0,
    "used_before": 1.0, "used_after": 1.2, "failed": [],
    "honest": {"longest": 0.2, "faults": [], "refused": []},
}  # fmt: skip


def test_a_process_over_its_limit_dies() -> None:
    limited = cage("test", 64 * MIB)
    try:
        hungry = limited.command([sys.executable, "-c", "x = bytearray(256 << 20); print(len(x))"])
        done = subprocess.run(hungry, capture_output=True, timeout=30)
        assert done.returncode != 0, limited.how
        assert limited.kills() == (limited.folder is not None)
    finally:
        limited.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"health": 1.5}, ["/health took 1.50 s, not 1"]),
        ({"ping": 0.6}, ["Redis took for PING 0.60 s, not 0.5"]),
        ({"rss_peak": 501.0}, ["the gateway had 501.00 MiB, not 500"]),
        ({"rss_after": 400.0}, ["the gateway kept 320.00 MiB, not 250"]),
        ({"used_after": 21.0}, ["Redis kept 20.00 MiB, not 16"]),
        ({"failed": ["OSError"]}, ["1 probes failed: OSError"]),
        ({"honest": CALM["honest"] | {"longest": 1.2}}, ["an honest stream waited 1.20 s, not 1"]),
        ({"honest": CALM["honest"] | {"faults": ["x"]}}, ["1 honest streams ended or changed: x"]),
        ({"honest": CALM["honest"] | {"refused": ["x"]}}, ["1 honest requests were refused: x"]),
    ],
)
def test_each_bound_breaks(change: dict[str, Any], says: list[str]) -> None:
    assert judge(Bounds(), CALM | change) == says


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers.of(POCKET / "model")


def test_an_honest_client_notices_another_token_and_another_text(answers: Answers) -> None:
    crowd = Crowd(url="", keys={}, streams=0, short=True, long_tokens=9, answers=answers)
    key = answers.key([1, 2, 3])

    def chunk(token_id: int, text: str) -> _Chunk:
        return _Chunk(choices=[_Choice(text=text, token_ids=[token_id])])

    stream = _Stream(tenant="alice", key=key, count=3, last=0.0)
    crowd._take(chunk(answers.token(key, 0), answers.text(key, 0)), stream)
    assert stream.index == 1
    for wrong in (chunk(answers.token(key, 2), answers.text(key, 2)), chunk(answers.token(key, 1), "other")):
        with pytest.raises(Fault, match="changed at 1"):
            crowd._take(wrong, stream)
    with pytest.raises(Fault, match="cut"):
        crowd._take(_Chunk(error={"code": "cut", "message": "off"}), stream)


@pytest.fixture
def answering() -> Iterator[tuple[int, list[bytes]]]:
    """A port on which each connection gets the next of some answers, then is closed."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(said.pop(0))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], said
        server.shutdown(socket.SHUT_RDWR)


def _http(status: int, body: bytes, missing: int = 0) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body) + missing, body)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (_http(200, b"{}"), "200"),
        (_http(200, b"{}", missing=1), "cut off"),
        (_http(200, b'data: {}\n\ndata: {"error": {"code": "gone"}}\n\n'), "200 gone"),
        (_http(400, b'{"error":{"code":"c","type":"t","message":"m"}}'), "400 c"),
        (_http(400, b'{"error":{"code":"c","type":"","message":"m"}}'), "untyped 400"),
        (_http(500, b"sorry"), "untyped 500"),
        (b"", "reset"),
    ],
)
def test_an_answer_is_named_for_what_it_is(answering: tuple[int, list[bytes]], said: bytes, kind: str) -> None:
    port, answers_to_give = answering
    answers_to_give.append(said)
    assert asyncio.run(Dialer(port=port).get("/", timeout_s=10)).kind == kind


def test_what_children_import_is_where_this_repository_is() -> None:
    import abuse

    assert Path(abuse.__file__).is_relative_to(Path(__file__).parents[2])
