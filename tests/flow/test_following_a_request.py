"""One request through `serve` by its log: the id that its client chose stands in the lines of all roles, also of the
attention worker that is killed with it and of the one that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.pocket.answers import serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

from services.runtime.address import incarnations_of

NAME = "slow-1"

pytestmark = pytest.mark.alone


def lines(server: Server) -> list[dict[str, Any]]:
    """The lines about the request that are complete, in the order in which they were written."""
    complete = (line for line in server.proc.log().splitlines() if line.startswith("{") and line.endswith("}"))
    return [json.loads(line) for line in complete if NAME in line]


def said(server: Server, role: str, message: str) -> list[dict[str, Any]]:
    return [line for line in lines(server) if line["role"].startswith(role) and line["message"].startswith(message)]


def test_the_id_of_a_request_leads_to_its_lines_in_all_roles(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, workers=2, log_level="debug", log_format="json")
        body = {"model": "pocket", "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
        headers = {"X-Request-Id": NAME}
        tokens, completion = 0, ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
            assert answer.headers["X-Request-Id"] == NAME
            for event in answer.iter_lines():
                if not event.startswith("data: {"):
                    continue
                completion, tokens = json.loads(event.removeprefix("data: "))["id"], tokens + 1
                if tokens == 3:
                    kill_the_worker_that_has_it(server)
        until(lambda: said(server, "gateway", "request"), "the gateway's last line is written")
        until(lambda: said(server, "attention", "ended"), "the worker's last line is written")

        (ended,) = said(server, "gateway", "request")
        assert (ended["request_id"], ended["completion"]) == (NAME, completion)
        assert (ended["attempts"], ended["finish"], ended["completion_tokens"]) == (2, "length", 400)
        assert ended["ttft_ms"] <= ended["ms"]

        sequence = completion.removeprefix("cmpl-") + "-0"
        about = [line for line in lines(server) if "sequence" in line]
        assert {(line["request_id"], line["sequence"]) for line in about} == {(NAME, sequence)}
        assert [line["attempt"] for line in said(server, "gateway", "lost an attempt")] == [1]
        assert [line["attempt"] for line in said(server, "gateway", "resubmitted")] == [2]
        assigned = said(server, "scheduler", "assigned")
        assert [(line["attempt"], line["level"]) for line in assigned] == [(1, "debug"), (2, "info")]
        assert assigned[0]["worker"] != assigned[1]["worker"]
        (lost,) = said(server, "serve", "lost an attempt") + said(server, "scheduler", "lost an attempt")
        assert (lost["attempt"], lost["worker"]) == (1, assigned[0]["worker"])
        started = said(server, "attention", "started")
        assert [line["attempt"] for line in started] == [1, 2]
        assert len({line["role"] for line in started}) == 2, "each worker says that it had the request"
        (done,) = said(server, "attention", "ended")
        assert (done["role"], done["attempt"], done["finish"]) == (started[1]["role"], 2, "length")


def kill_the_worker_that_has_it(server: Server) -> None:
    until(lambda: said(server, "scheduler", "assigned"), "the assignment is in the log")
    (line,) = said(server, "scheduler", "assigned")
    (victim,) = [each for each in server.of_role("attention") if line["worker"].startswith(incarnations_of(each.pid))]
    victim.kill()
