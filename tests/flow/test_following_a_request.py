"""One request through `serve` by its log: the id that its client chose stands in the lines of all roles, also of the
attention worker that is killed with it and of the one that goes on. What it asks, and the answer, stand in none."""

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

NAME, SECRET = "slow-1", "sk-of-nobody-else-7f3a"
PROMPT = "define: zyzzyva quokka palimpsest"

pytestmark = pytest.mark.alone


def lines(server: Server) -> list[dict[str, Any]]:
    """The lines about the request that are complete, in the order in which they were written."""
    complete = (line for line in server.proc.log().splitlines() if line.startswith("{") and line.endswith("}"))
    return [json.loads(line) for line in complete if NAME in line]


def said(server: Server, role: str, message: str) -> list[dict[str, Any]]:
    return [line for line in lines(server) if line["role"].startswith(role) and line["message"].startswith(message)]


def test_the_id_of_a_request_leads_to_its_lines_in_all_roles(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, workers=2, log_level="debug", log_format="json", api_key=SECRET)
        body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
        body |= {"return_token_ids": True}
        headers = {"X-Request-Id": NAME, "Authorization": f"Bearer {SECRET}"}
        tokens, completion, text, ids = 0, "", "", list[int]()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
            assert answer.headers["X-Request-Id"] == NAME
            for event in answer.iter_lines():
                if not event.startswith("data: {"):
                    continue
                chunk = json.loads(event.removeprefix("data: "))
                completion, tokens = chunk["id"], tokens + 1
                text += chunk["choices"][0]["text"]
                ids += chunk["choices"][0].get("token_ids") or []
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
        assert {line.get("tenant") for line in [*about, ended]} == {"default"}
        refuse(server)
        log = server.proc.log()
        assert_absent(log, [SECRET, "zyzzyva", "quokka", *pieces(text)])
        asked = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}, headers=headers).json()["tokens"]
        assert len(ids) == 400
        assert_absent(log, [str(part).strip("[]") for part in (asked[:4], asked[-4:], ids[:4], ids[200:204])])


def refuse(server: Server) -> None:
    """Requests that are refused for what is in them, or for their key."""
    right, wrong = {"Authorization": f"Bearer {SECRET}"}, {"Authorization": f"Bearer {SECRET}-zyzzyva"}
    bodies: list[tuple[Any, dict[str, str]]] = [
        ({"model": "pocket", "prompt": PROMPT}, wrong),
        ({"model": "pocket", "prompt": {"text": PROMPT}}, right),
        ({"model": "pocket", "prompt": PROMPT, "max_tokens": -1}, right),
        ({"model": "pocket", "prompt": PROMPT, "stop": [PROMPT] * 200}, right),
        ({"model": "pocket", "messages": [{"role": "user", "content": PROMPT}]}, right),
    ]
    for body, headers in bodies:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert 400 <= answer.status_code < 500, body
    broken = f'{{"prompt": "{PROMPT}'
    assert httpx.post(f"{server.url}/v1/completions", content=broken, headers=right).status_code == 400
    until(lambda: server.proc.log().count('"status": 4') >= len(bodies) + 1, "the refusals are in the log")


def pieces(text: str) -> list[str]:
    """Parts of ``text`` that no line has by chance, as JSON writes them."""
    return [json.dumps(text[at : at + 24])[1:-1] for at in range(0, len(text) - 24, 200)]


def assert_absent(log: str, secrets: list[str]) -> None:
    found = {secret: next(line for line in log.splitlines() if secret in line) for secret in secrets if secret in log}
    assert found == {}


def kill_the_worker_that_has_it(server: Server) -> None:
    until(lambda: said(server, "scheduler", "assigned"), "the assignment is in the log")
    (line,) = said(server, "scheduler", "assigned")
    (victim,) = [each for each in server.of_role("attention") if line["worker"].startswith(incarnations_of(each.pid))]
    victim.kill()
