"""What the chart drew at the first installation stays, whatever its name. The Secret is played by a value."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from services.queue.acl import RULES

KEY = "em-" + "k" * 43
FILE = yaml.safe_dump({"keys": [{"name": "team", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]})
OTHER = yaml.safe_dump({"keys": []})
API_KEYS = '{{ include "expertmesh.keptApiKeys" (dict "root" $ "name" "kept" "found" .Values.global.found) }}'
PASSWORD = """redis-password: {{ include "expertmesh.kept" (dict "setting" "redis.auth.key" "key" .Values.redis.auth.key
  "name" "kept" "found" .Values.global.found "new" "drawn") }}"""
Kept = Callable[..., Any]


@pytest.fixture
def kept(probed: Callable[..., Any]) -> Kept:
    """What ``template`` makes of a Secret with ``found``, in plain text; or what helm says instead."""

    def run(template: str, found: dict[str, str], *settings: str) -> dict[str, str] | str:
        data = {name: base64.b64encode(value.encode()).decode() for name, value in found.items()}
        secret = {"data": data} if found else {}
        done = probed(template, secret, *settings, options=("--show-only", "templates/probe.yaml"))
        if done.returncode != 0:
            return str(done.stderr)
        entries: dict[str, str] = yaml.safe_load(done.stdout)
        return {name: base64.b64decode(value).decode() for name, value in entries.items()}

    return run


def test_users_of_redis_keep_their_passwords_and_a_new_one_gets_its_own(kept: Kept) -> None:
    users = '{{ include "expertmesh.keptUsers" (dict "root" $ "found" .Values.global.found) }}'
    drawn = kept(users, {})
    assert drawn.keys() == set(RULES)
    assert len(set(drawn.values())) == len(RULES)
    assert min(map(len, drawn.values())) == 40
    assert kept(users, drawn) == drawn
    later = kept(users, {name: password for name, password in drawn.items() if name != "operator"})
    assert later.pop("operator") != drawn.pop("operator")
    assert later == drawn


def test_keys_are_drawn_once(kept: Kept) -> None:
    drawn = kept(API_KEYS, {})
    assert drawn.keys() == {"api-key", "keys.yaml"}
    assert hashlib.sha256(drawn["api-key"].encode()).hexdigest() in drawn["keys.yaml"]
    assert kept(API_KEYS, drawn) == drawn


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["auth.plainKey=mine"], ["mine", "keys.yaml"]),
        (["auth.key=tenants.yaml"], ["api-key", "tenants.yaml"]),
        (["auth.plainKey=mine", "auth.key=tenants.yaml"], ["mine", "tenants.yaml"]),
    ],
)
def test_keys_move_to_another_name(kept: Kept, settings: list[str], names: list[str]) -> None:
    found = {"api-key": KEY, "keys.yaml": FILE, "note": "of ours"}
    assert kept(API_KEYS, found, *settings) == dict(zip(names, (KEY, FILE), strict=True))


def test_a_plain_key_that_was_taken_away_is_not_drawn_again(kept: Kept) -> None:
    """The file would not have its hash."""
    assert kept(API_KEYS, {"keys.yaml": FILE, "note": "of ours"}) == {"keys.yaml": FILE}


@pytest.mark.parametrize("found", [{"api-key": KEY}, {"api-key": KEY, "a.yaml": FILE, "b.yaml": OTHER}])
def test_a_file_that_is_not_known_is_asked_for(kept: Kept, found: dict[str, str]) -> None:
    said = kept(API_KEYS, found)
    names = ", ".join(sorted(found))
    assert f"auth.key is keys.yaml, but the Secret kept that is kept has {names}. Set auth.key" in said
    if "b.yaml" in found:
        assert kept(API_KEYS, found, "auth.key=b.yaml")["b.yaml"] == OTHER


def test_a_password_moves_to_another_name(kept: Kept) -> None:
    assert kept(PASSWORD, {}) == {"redis-password": "drawn"}
    found = {"redis-password": "first"}
    assert kept(PASSWORD, found) == kept(PASSWORD, found, "redis.auth.key=mine") == {"redis-password": "first"}
    found["note"] = "of ours"
    assert kept(PASSWORD, found) == {"redis-password": "first"}
    said = kept(PASSWORD, found, "redis.auth.key=mine")
    has = "the Secret kept that is kept has note, redis-password"
    assert f"redis.auth.key is mine, but {has}. Set redis.auth.key" in said
    assert "or redis.auth.existingSecret to a Secret of yours" in said
