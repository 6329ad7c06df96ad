"""Log lines: their two shapes, and the request id that follows a task."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from services.runtime import bind_request_id, bind_tenant, configure_logging


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _configured(role: str = "x", *style: str, stream: io.StringIO | None = None) -> io.StringIO:
    """Where lines go: as to a file unless ``stream`` is given."""
    stream = stream or io.StringIO()
    configure_logging(role, *style, stream=stream)
    return stream


def _json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_where_there_is_no_terminal() -> None:
    stream = _configured("gateway")
    logging.getLogger("x").info("hello %s", "wörld\nnext", extra={"tokens": 3, "path": object})
    (line,) = _json_lines(stream)
    assert line["message"] == "hello wörld\nnext"
    assert (line["role"], line["level"], line["logger"], line["tokens"]) == ("gateway", "info", "x", 3)
    assert str(line["time"]).endswith("Z")


def test_text_on_a_terminal() -> None:
    stream = _configured("scheduler", stream=_Terminal())
    logging.getLogger("x").warning("odd", extra={"request_id": "r1", "tokens": 3})
    assert stream.getvalue().endswith("WARNING scheduler  odd  request_id=r1  tokens=3\n")


def test_nothing_that_a_client_sends_makes_a_line_of_its_own_or_reaches_the_terminal() -> None:
    stream = _configured("gateway", stream=_Terminal())
    forged = "/a\n12:00:00 ERROR gateway  forged\r\x1b[31m\x9b2J\u202eé 你"
    logging.getLogger("x").info("asked for %s", forged, extra={"path": forged})
    shown = "/a\\n12:00:00 ERROR gateway  forged\\r\\x1b[31m\\x9b2J\\u202eé 你"
    assert stream.getvalue().endswith(f'asked for {shown}  path="{shown}"\n')
    assert stream.getvalue().count("\n") == 1


def test_a_value_cannot_be_taken_for_further_fields() -> None:
    stream = _configured("gateway", stream=_Terminal())
    given = {"path": "/a  request_id=slow-1", "why": 'no "x\\', "model": "tiny-1.0:b", "empty": "", "ms": 1.5}
    logging.getLogger("x").info("request", extra=given)
    fields = r"""path="/a  request_id=slow-1"  why="no \"x\\"  model=tiny-1.0:b  empty=""  ms=1.5"""
    assert stream.getvalue().endswith(f"request  {fields}\n")


def test_json_logs_escape_what_steers_a_terminal() -> None:
    stream = _configured()
    forged = "/a\n\r\x1b[31m\x7f\x9b2J\u202e\u2028\U000e0001é 你😀"
    logging.getLogger("x").info("asked", extra={"path": forged})
    line = stream.getvalue()
    assert line[:-1].isprintable()
    assert (line[-1], line.count("é 你😀")) == ("\n", 1)
    assert json.loads(line)["path"] == forged


def _fail() -> None:
    try:
        raise ValueError("why \x1b[31m")
    except ValueError:
        logging.getLogger("x").exception("failed", extra={"path": "/a\n"})


def test_a_traceback_keeps_its_lines_as_text_and_stays_on_its_line_as_json() -> None:
    stream = _configured(stream=_Terminal())
    _fail()
    head, *trace = stream.getvalue().splitlines()
    assert head.endswith('failed  path="/a\\n"')
    assert trace[-1] == "ValueError: why \\x1b[31m"
    stream = _configured()
    _fail()
    (line,) = _json_lines(stream)
    assert "ValueError: why" in str(line["exception"])


def test_the_style_can_be_forced_the_level_holds_and_configuring_again_replaces() -> None:
    first, second = _Terminal(), _Terminal()
    for stream in (first, second):
        _configured("x", "warning", "json", stream=stream)
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    assert first.getvalue() == ""
    assert [line["message"] for line in _json_lines(second)] == ["loud"]


async def test_request_ids_follow_their_tasks() -> None:
    stream = _configured()

    async def work(request_id: str) -> None:
        with bind_request_id(request_id):
            await asyncio.sleep(0)
            logging.getLogger("x").info(request_id)

    await asyncio.gather(work("r1"), work("r2"))
    logging.getLogger("x").info("none")
    assert [line.get("request_id") for line in _json_lines(stream)] == ["r1", "r2", None]


async def test_the_tenant_follows_a_request_s_tasks_once_it_is_known() -> None:
    stream = _configured()

    async def work(request_id: str, tenant: str) -> None:
        with bind_request_id(request_id):
            logging.getLogger("x").info("before")
            bind_tenant(tenant)
            await asyncio.create_task(later())
            logging.getLogger("x").info("of another", extra={"request_id": "r9"})

    async def later() -> None:
        logging.getLogger("x").info("after")

    bind_tenant("nobody")
    await asyncio.gather(work("r1", "alice"), work("r2", "bob"))
    logging.getLogger("x").info("none")
    found = {(line["message"], line.get("request_id"), line.get("tenant")) for line in _json_lines(stream)}
    assert found == {
        *(("before", name, None) for name in ("r1", "r2")),
        *(("after", name, tenant) for name, tenant in (("r1", "alice"), ("r2", "bob"))),
        ("of another", "r9", None),
        ("none", None, None),
    }
