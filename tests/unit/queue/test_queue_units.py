"""The parts of the queue that need no Redis."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConcurrencyLimited, ConfigError, QueueFull, RateLimited
from services.messages import WorkerInfo
from services.queue.admission import raise_refusal, tenant_arguments
from services.queue.connect import connect
from services.queue.keys import Keys
from services.queue.limits import QueueLimits, TenantLimits
from services.queue.scheduler_side import Assignment, WorkerState
from services.queue.scripts import load_scripts, milliseconds, pack_limits


@pytest.mark.parametrize("namespace", ["", "a b", "a{b", "a}b", "a\nb"])
def test_namespaces_that_break_the_hash_tag_are_refused(namespace):
    with pytest.raises(ConfigError):
        Keys(namespace)


@pytest.mark.parametrize("url", ["localhost:6379", "http://x", "redis://host:port", "redis://host:1?socket_timeout=x"])
def test_malformed_urls_are_refused(url):
    with pytest.raises(ConfigError):
        connect(url)


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://u:p@h", "unix:///tmp/s?db=1", "unix://:p@/tmp/s"])
def test_urls_of_every_kind(url):
    client = connect(url)
    options = client.connection_pool.connection_kwargs
    assert options["socket_timeout"] == 5
    assert options.get("socket_keepalive", False) is not url.startswith("unix")
    assert options["retry"].get_retries() == 0


def test_tenant_arguments():
    assert tenant_arguments(None) == (-1, 0.0, 0)
    assert tenant_arguments(TenantLimits(concurrency=0)) == (0, 0.0, 0)
    assert tenant_arguments(TenantLimits(requests_per_minute=120)) == (-1, 500.0, 120)
    assert tenant_arguments(TenantLimits(requests_per_minute=0.5)) == (-1, 120_000.0, 1)
    assert tenant_arguments(TenantLimits(requests_per_minute=60, burst=5)) == (-1, 1000.0, 5)


@given(st.integers(0, 10**15))
def test_waits_are_rounded_up_and_clamped(wait_ms):
    with pytest.raises(QueueFull) as refusal:
        raise_refusal([b"tokens", wait_ms, 7], 1)
    seconds = refusal.value.retry_after_s
    assert 1 <= seconds <= 120
    assert seconds * 1000 >= min(wait_ms, 120_000)


def test_bounds_have_errors_of_their_own():
    raise_refusal([b"ok", 1, 2], 1)
    for bound, error in ((b"requests", QueueFull), (b"concurrency", ConcurrencyLimited), (b"rate", RateLimited)):
        with pytest.raises(error):
            raise_refusal([bound, 1, 2], 1)


def test_no_lifetime_is_zero():
    assert milliseconds(0) == 1
    assert milliseconds(1.5) == 1500


def test_limits_reach_the_scripts():
    packed = msgspec.msgpack.decode(
        pack_limits(QueueLimits(lease_s=2, quantum=7)), strict=False, type=dict[str, msgspec.Raw]
    )
    assert msgspec.msgpack.decode(packed["lease_ms"]) == 2000
    assert msgspec.msgpack.decode(packed["quantum"]) == 7
    wanted = set()
    for script in load_scripts().values():
        wanted |= {word.split("C.")[1] for word in _words(script.text) if word.startswith("C.")}
    assert wanted <= set(packed)


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() or c in "._" else " " for c in text).split()


def test_credit():
    info = WorkerInfo(
        id="w", model="m", fingerprint="f", kv_tokens=1, max_num_seqs=1, max_model_len=1, host="h", pid=1, version="0"
    )

    def state(tokens: int, requests: int) -> WorkerState:
        return WorkerState(
            info=info, outstanding_tokens=tokens, outstanding_requests=requests, credit_tokens=10, credit_requests=2
        )

    assert state(0, 0).has_credit(1000)
    assert state(5, 1).has_credit(5)
    assert not state(5, 1).has_credit(6)
    assert not state(2, 2).has_credit(1)


def test_an_assignment_that_waited_no_time_is_one():
    assert Assignment(0.0)
    assert not Assignment(None)
