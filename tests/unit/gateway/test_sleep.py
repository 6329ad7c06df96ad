"""POST /sleep, POST /wake_up and GET /is_sleeping: who may, what is answered, and what probes say meanwhile."""

from __future__ import annotations

import pytest
from testkit.http_peer import bearer
from testkit.queue.scripted import ScriptedSwitch

from services.config import Settings
from services.errors import ConfigError, QueueUnavailable
from services.gateway.auth import ApiKey, digest
from services.gateway.role import check_sleep


class Keys:
    """Two keys: one of an operator, one of a client."""

    def __init__(self) -> None:
        self._keys = {
            digest(name): ApiKey(name=name, sha256=digest(name), admin=name == "operator")
            for name in ("operator", "client")
        }

    async def find(self, sha256: str) -> ApiKey | None:
        return self._keys.get(sha256)

    def recall(self, sha256: str) -> ApiKey | None:
        return self._keys.get(sha256)

    async def usable(self) -> bool:
        return True


async def test_it_answers_once_the_workers_sleep_and_once_they_are_awake(start):
    switch = ScriptedSwitch(looks=3)
    http = (await start(switch=switch)).http
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}, "a worker is still on its way"
    answer = await http.post("/sleep?level=1")
    assert (answer.status_code, answer.json(), switch.ordered) == (200, {"is_sleeping": True}, 1)
    assert switch.looks < 0, "it waited for the workers"
    assert (await http.post("/sleep", params={"level": "2"})).status_code == 200
    assert switch.ordered == 2
    assert (await http.get("/health")).json() == {"status": "sleeping"}
    ready = await http.get("/ready")
    assert ready.status_code == 503
    assert "a wake-up" in ready.json()["error"]["message"]
    for _ in range(2):
        answer = await http.post("/wake_up")
        assert (answer.status_code, answer.json(), switch.ordered) == (200, {"is_sleeping": False}, 0)


async def test_workers_that_take_longer_get_202_and_the_order_holds(start):
    switch = ScriptedSwitch(looks=1000)
    answer = await (await start(switch=switch)).http.post("/sleep")
    assert (answer.status_code, answer.json(), switch.ordered) == (202, {"is_sleeping": True}, 1)


@pytest.mark.parametrize("level", ["0", "3", "-1", "deep", "", "1.0"])
async def test_a_level_that_there_is_not_is_refused(start, level):
    switch = ScriptedSwitch()
    answer = await (await start(switch=switch)).http.post("/sleep", params={"level": level})
    assert (answer.status_code, answer.json()["error"]["param"], switch.ordered) == (400, "level", 0)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
@pytest.mark.parametrize(
    "asked", [{"json": {"level": 2}}, {"content": b"{}"}, {"params": [("level", "1"), ("level", "2")]}]
)
async def test_what_would_have_no_effect_is_refused(start, path, asked):
    switch = ScriptedSwitch()
    answer = await (await start(switch=switch)).http.post(path, **asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert switch.ordered == 0


async def test_the_mode_that_there_is_may_be_named_and_the_document_has_all_answers(start):
    http = (await start(switch=ScriptedSwitch())).http
    assert (await http.post("/sleep?mode=wait")).status_code == 200
    paths = (await http.get("/openapi.json")).json()["paths"]
    for path in ("/sleep", "/wake_up"):
        assert {"200", "202", "400", "401", "403", "404", "415", "503"} <= paths[path]["post"]["responses"].keys()


@pytest.mark.parametrize("query", ["tags=weights", "tags=weights&mode=abort"])
async def test_parts_of_the_memory_do_not_sleep_by_themselves(start, query):
    switch = ScriptedSwitch()
    http = (await start(switch=switch)).http
    for path in ("/sleep", "/wake_up"):
        answer = await http.post(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert switch.ordered == 0


async def test_requests_are_never_aborted(start):
    switch = ScriptedSwitch()
    answer = await (await start(switch=switch)).http.post("/sleep?mode=abort")
    assert (answer.status_code, answer.json()["error"]["param"], switch.ordered) == (400, "mode", 0)


async def test_without_the_option_there_are_no_such_paths(start):
    http = (await start()).http
    for answer in (await http.post("/sleep"), await http.post("/wake_up"), await http.get("/is_sleeping")):
        assert answer.status_code == 404
        assert "--enable-sleep-mode" in answer.json()["error"]["message"]
    assert (await http.get("/health")).json() == {"status": "ok"}


async def test_a_key_needs_the_right_to_order_and_any_key_may_look(start):
    switch = ScriptedSwitch()
    http = (await start(switch=switch, store=Keys())).http
    for path in ("/sleep", "/wake_up"):
        assert (await http.post(path)).status_code == 401
        assert (await http.post(path, headers=bearer("client"))).status_code == 403
    assert switch.ordered == 0
    assert (await http.get("/is_sleeping")).status_code == 401
    assert (await http.get("/is_sleeping", headers=bearer("client"))).json() == {"is_sleeping": False}
    assert (await http.post("/sleep", headers=bearer("operator"))).status_code == 200
    assert switch.ordered == 1


async def test_a_web_page_cannot_order_it_where_clients_need_no_key(start):
    switch = ScriptedSwitch()
    http = (await start(switch=switch, same_machine=True)).http
    assert (await http.post("/sleep", headers={"origin": "https://evil.example"})).status_code == 415
    assert switch.ordered == 0
    assert (await http.post("/sleep")).status_code == 200, "curl -X POST sends neither body nor Origin"


async def test_probes_do_not_wait_for_redis(start):
    class Away(ScriptedSwitch):
        async def look(self):
            raise QueueUnavailable("Redis is away.")

    http = (await start(switch=Away())).http
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/is_sleeping")).status_code == 503


def test_without_keys_only_this_machine_may_be_let_order_it():
    asked = Settings(enable_sleep_mode=True, host="0.0.0.0", auth="off")
    with pytest.raises(ConfigError, match="keys create NAME --admin"):
        check_sleep(asked, None)
    check_sleep(asked.model_copy(update={"host": "127.0.0.1"}), None)
    check_sleep(asked, Keys())
    check_sleep(asked.model_copy(update={"enable_sleep_mode": False}), None)
