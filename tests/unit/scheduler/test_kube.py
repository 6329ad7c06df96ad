"""Replica counts by Kubernetes: a list and watches of a real HTTP server, and which seats leave by them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.config.incluster_config import InClusterConfigLoader
from testkit.kube.workload_api import ApiServer, stateful_set
from testkit.waiting import until

from services.errors import ConfigError, KubernetesUnavailable
from services.messages import ExpertInfo, SeatReport
from services.queue.seats import SeatState
from services.scheduler.kube import Api, KubeReplicas, Observed
from services.scheduler.kube import connecting as connecting_in_pod
from services.scheduler.kube.follower import Follower
from services.scheduler.kube.replicas import without_leaving
from services.scheduler.kube.workloads import Workload, ordinal_of, workload
from services.scheduler.scaling import Replicas, Target
from services.status.kube import connected

TIMEOUT_S = 20.0
EXPERTS = Target("experts", 0)
Connect = Callable[[], Api]


def connecting(url: str) -> Connect:
    def connect() -> Api:
        configuration = Configuration(host=url)
        configuration.retries = False
        return Api(ApiClient(configuration), namespace="there", selector="app.kubernetes.io/instance=mesh")

    return connect


@pytest.fixture
def server() -> ApiServer:
    found = ApiServer()
    found.put("statefulsets", stateful_set("mesh-experts-0", 2, ready=1))
    found.put("deployments", stateful_set("mesh-attention", None, ready=1, role="attention"))
    return found


@contextmanager
def followed(server: ApiServer, **how: Any) -> Iterator[Follower]:
    """The StatefulSets alone."""
    with server.serving() as url:
        found = Follower("statefulsets", connecting(url), **how)
        found.start()
        yield found
        found.close()


@contextmanager
def following(server: ApiServer, connect: Callable[[str], Connect] = connecting, **how: bool) -> Iterator[KubeReplicas]:
    with server.serving() as url:
        found = KubeReplicas(connect(url), **how)
        found.start()
        yield found
        found.close()


@pytest.fixture
def replicas(server: ApiServer) -> Iterator[KubeReplicas]:
    with following(server) as found:
        yield found


def count(replicas: KubeReplicas, target: Target = EXPERTS) -> int | None:
    counts = replicas.counts()
    return counts[target].wanted if counts and target in counts else None


def test_counts_are_unknown_before_the_first_answer_and_what_changes_is_heard_of(
    server: ApiServer, replicas: KubeReplicas
) -> None:
    assert KubeReplicas(connecting("http://127.0.0.1:1")).counts() is None
    until(lambda: replicas.counts() is not None)
    assert replicas.counts() == {EXPERTS: Replicas(wanted=2, ready=1), Target("attention"): Replicas(wanted=1, ready=1)}
    assert {line.split()[1] for line in server.asked} == {
        "/apis/apps/v1/namespaces/there/statefulsets",
        "/apis/apps/v1/namespaces/there/deployments",
    }
    assert all(line.endswith(" app.kubernetes.io/instance=mesh") for line in server.asked)
    server.put("statefulsets", stateful_set("mesh-experts-0", 5, ready=2))
    until(lambda: count(replicas) == 5)
    server.put("statefulsets", stateful_set("mesh-experts-0", 0))
    until(lambda: count(replicas) == 0)
    server.put("statefulsets", stateful_set("mesh-experts-1", 3, shard="1"))
    until(lambda: count(replicas, Target("experts", 1)) == 3)
    server.delete("statefulsets", "mesh-experts-1")
    until(lambda: count(replicas, Target("experts", 1)) is None)
    assert count(replicas) == 0


def test_groups_of_attention_workers_are_counted_once(server: ApiServer) -> None:
    """The controller gives its StatefulSets the labels of the LeaderWorkerSet."""
    server.delete("deployments", "mesh-attention")
    group = stateful_set("mesh-attention", 3, ready=2, role="attention")
    server.put("leaderworkersets", group)
    for name in ("mesh-attention", "mesh-attention-0"):
        part = stateful_set(name, 3, ready=3, role="attention")
        part["metadata"]["labels"] |= {"leaderworkerset.sigs.k8s.io/name": "mesh-attention"}
        server.put("statefulsets", part)
    with following(server, groups=True) as replicas:
        until(lambda: replicas.counts() is not None)
        counts = replicas.counts() or {}
    assert counts[Target("attention")] == Replicas(wanted=3, ready=2)
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/there/leaderworkersets"
    assert f"list {path} app.kubernetes.io/instance=mesh" in server.asked


def test_a_watch_that_ends_is_resumed_where_it_ended(server: ApiServer, replicas: KubeReplicas) -> None:
    server.watch_s, server.bookmarks = 0.05, True
    until(lambda: count(replicas) == 2)
    until(lambda: sum("watch" in line for line in server.asked) > 6)
    server.put("statefulsets", stateful_set("mesh-experts-0", 4))
    until(lambda: count(replicas) == 4)
    until(lambda: max(server.watched_from) == server.version)
    assert sum("list" in line for line in server.asked) == 2


@pytest.mark.parametrize(("disturb", "lists"), [(ApiServer.forget, 3), (ApiServer.cut, 2)])
def test_neither_a_forgotten_version_nor_a_broken_connection_costs_a_change(
    server: ApiServer, replicas: KubeReplicas, disturb: Callable[[ApiServer], None], lists: int
) -> None:
    until(lambda: sum("watch" in line for line in server.asked) == 2)
    disturb(server)
    server.put("statefulsets", stateful_set("mesh-experts-0", 3))
    until(lambda: count(replicas) == 3)
    assert sum("list" in line for line in server.asked) >= lists, "what is forgotten is listed again"


def test_an_api_server_that_restarts_is_found_again_and_held_meanwhile(server: ApiServer) -> None:
    with server.serving() as url:
        replicas = KubeReplicas(connecting(url))
        replicas.start()
        until(lambda: count(replicas) == 2)
    assert count(replicas) == 2, "what was known holds for a while"
    server.put("statefulsets", stateful_set("mesh-experts-0", 3))
    with server.serving(port=int(url.rsplit(":", 1)[1])):
        until(lambda: count(replicas) == 3)
        replicas.close()


def test_what_is_old_is_not_known_any_more(server: ApiServer) -> None:
    now = [0.0]
    with followed(server, stale_s=60.0, clock=lambda: now[0]) as follower:
        until(lambda: follower.workloads)
        server.refusal = 500
        server.cut()
        now[0] = 59.0
        assert follower.workloads
        now[0] = 61.0
        assert follower.workloads is None, "unknown, not none"
        server.refusal = None
        until(lambda: follower.workloads)


def test_missing_rights_are_said_once_with_what_to_do(
    server: ApiServer, replicas: KubeReplicas, caplog: pytest.LogCaptureFixture
) -> None:
    server.refusal = 403
    server.cut()

    until(lambda: len(server.asked) > 12 and "may not get, list and watch" in caplog.text)
    assert caplog.text.count("may not get, list and watch") <= 2, "once for each kind"
    server.refusal = None
    until(lambda: count(replicas) == 2)


def test_a_token_that_was_renewed_is_read_again(server: ApiServer, tmp_path: Path) -> None:
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_text("an authority")
    server.token = "first"

    def connect(url: str) -> Api:
        host, port = url.removeprefix("http://").split(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        configuration = Configuration()
        InClusterConfigLoader(str(token), str(authority), environ=environ).load_and_set(configuration)
        configuration.host, configuration.retries = url, False
        configuration.refresh_api_key_hook = None  # within its minute: this is the effect of the refusal
        return Api(ApiClient(configuration), namespace="there", selector="a=b")

    with following(server, lambda url: partial(connect, url)) as replicas:
        until(lambda: count(replicas) == 2)
        server.token = "second"
        server.cut()
        until(lambda: server.refused > 2)
        token.write_text("second")
        server.put("statefulsets", stateful_set("mesh-experts-0", 7))
        until(lambda: count(replicas) == 7)


def test_closing_ends_the_threads_while_they_wait(server: ApiServer) -> None:
    with followed(server) as follower:
        until(lambda: any("watch" in line for line in server.asked))
        follower.close()
        until(lambda: not follower._thread.is_alive())
    KubeReplicas(connecting("http://127.0.0.1:1")).close()  # that never began


def test_a_watch_that_begins_while_it_is_closed_ends(server: ApiServer) -> None:
    with server.serving() as url:
        api = connecting(url)()
        _, version = api.list("statefulsets")
        api.close()
        with pytest.raises(KubernetesUnavailable, match="closed here"):
            next(api.watch("statefulsets", version))


def test_what_answers_but_is_no_api_server_does_no_harm() -> None:
    server = ApiServer()
    server.refusal = 200  # a page, and not a list
    with followed(server) as follower:
        until(lambda: len(server.asked) > 2)
        assert follower.workloads is None


def test_outside_of_a_pod_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kubernetes-selector is for pods"):
        connecting_in_pod("a=b", tmp_path)


def test_without_the_package_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "namespace").write_text("there")
    for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"package kubernetes.* is not installed.*'expertmesh\[kubernetes\]'"):
        connecting_in_pod("a=b", tmp_path)
    with pytest.raises(KubernetesUnavailable, match=r"'expertmesh\[kubernetes\]'"):
        connected(None)


LOOK = """
import services.scheduler.role, sys
print(*sys.modules)
from services.runtime.kube_client import in_pod_client
try: in_pod_client()
except Exception: pass
print(*sys.modules)
"""


def test_of_the_package_only_what_sends_requests_is_imported_and_that_where_it_is_needed() -> None:
    """Its generated calls and models are 800 modules, which take seconds: a scheduler would start as much later."""
    run = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=120)
    before, after = (set(line.split()) for line in run.stdout.splitlines())
    assert before & {"kubernetes", "torch"} == set()
    assert "kubernetes.client.api_client" in after
    assert [name for name in after if name.startswith(("kubernetes.client.api.", "kubernetes.client.models."))] == []


@pytest.mark.parametrize(
    ("pod", "parts"),
    [
        ("mesh-experts-0-2", ("mesh-experts-0", 2)),
        ("a-10", ("a", 10)),
        ("mesh-attention-7d9f-x2x", None),
        ("mesh-02", None),
        ("", None),
    ],
)
def test_a_pods_name_has_its_set_and_ordinal(pod: str, parts: tuple[str, int] | None) -> None:
    assert ordinal_of(pod) == parts


def test_workloads_of_nobody_are_left_out() -> None:
    assert workload(stateful_set("mesh-redis", 1, role="redis")) is None
    assert workload(stateful_set("mesh-experts-0", 1, shard="first")) is None
    assert workload({"metadata": {"name": "bare"}}) is None


def seat(number: int, pod: str | None, *, status: str = "ready", digest: str = "g0") -> SeatState:
    info = ExpertInfo(
        id=f"worker-{number}", fingerprint="f", host="h", port=1, memory_bytes=1, pid=1, version="1", pod=pod
    )
    report = SeatReport(status=status, digest=digest)  # type: ignore[arg-type]
    return SeatState(
        number=number, info=info, status=report.status, report=report, dismissed=False, assigned=digest or None
    )


def leaving(seats: list[SeatState], wanted: int | None, first: int = 0) -> set[int]:
    sets = {}
    if wanted is not None:
        sets["s-0"] = Workload(name="s-0", target=EXPERTS, replicas=Replicas(wanted=wanted, ready=0), first=first)
    return {each.number for each in without_leaving(seats, sets) if each.dismissed}


def test_seats_beyond_the_count_leave_and_come_back_with_it() -> None:
    seats = [seat(1, "s-0-0"), seat(2, "s-0-1"), seat(3, "s-0-2")]
    for wanted, gone in ((3, set()), (1, {2, 3}), (1, {2, 3}), (3, set())):
        assert leaving(seats, wanted) == gone, "nothing is written down"
    assert leaving(seats, 1, first=1) == {3}, "ordinals may begin elsewhere"


def test_whom_a_group_needs_or_of_whom_nothing_is_known_stays() -> None:
    assert leaving([seat(1, "s-0-0"), seat(2, "s-0-1")], 0) == set(), "until the last one says that it leaves"
    assert leaving([seat(1, "s-0-0", status="loading"), seat(2, "s-0-1")], 1) == set()
    assert leaving([seat(1, "s-0-0", digest="other"), seat(2, "s-0-1")], 1) == set()
    assert leaving([seat(1, "s-0-0"), seat(2, "s-0-1", status="loading", digest="")], 1) == {2}
    assert leaving([seat(1, "s-0-0"), seat(2, "s-0-1")], None) == set()
    assert leaving([seat(1, "s-0-0"), seat(2, None), seat(3, "t-0-9")], 1) == set()


def test_a_wanted_count_that_nobody_sets_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    observed = Observed(lambda: now[0])
    caplog.set_level("INFO")
    for second, wanted, found in ((0, 3, 1), (60, 3, 2), (80, 3, 3), (85, 3, 1), (170, 2, 1), (176, 3, 1), (300, 3, 1)):
        now[0] = second
        observed.note({EXPERTS: wanted, Target("gateway"): 1}, {EXPERTS: Replicas(wanted=found, ready=1)})
        assert [record.levelname for record in caplog.records] == (["WARNING"] if second >= 176 else [])
    assert (
        caplog.records[0].getMessage().startswith("experts/0: 3 replicas are desired, but Kubernetes has been set to 1")
    )
    observed.note({EXPERTS: 3}, {EXPERTS: Replicas(wanted=3, ready=1)})
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
