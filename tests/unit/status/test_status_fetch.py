"""`expertmesh status` while a Job fetches the model, and when it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from testkit.kube.api_server import ApiServer, Object, labels, pod, workload

Status = Callable[..., Any]
NAME = "mesh-fetch-1a2b3c4d"
DIGEST = "model.safetensors has SHA-256 00, not 11."
GAVE_UP = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "reached the backoff limit"}


def job(api: ApiServer, *conditions: Object, **status: Any) -> None:
    meta = {"name": NAME, "uid": "j", "labels": labels("fetch")}
    api.lists["jobs"] = [{"metadata": meta, "spec": {}, "status": {"conditions": list(conditions)} | status}]


def attempt(api: ApiServer, name: str, second: int, ready: bool = False, **status: Any) -> None:
    made = pod(f"{NAME}-{name}", "fetch", ready=ready, **status)
    made["metadata"] |= {"ownerReferences": [{"uid": "j"}], "creationTimestamp": f"2026-11-22T22:00:{second:02}Z"}
    api.lists["pods"].append(made)


def failed(api: ApiServer, name: str, second: int, message: str) -> None:
    end = {"exitCode": 1, "reason": "Error", "message": message}
    attempt(api, name, second, phase="Failed", containerStatuses=[{"name": "fetch", "state": {"terminated": end}}])


def waiting(api: ApiServer) -> None:
    """A gateway that the model keeps from starting."""
    [gateway] = [each for each in api.lists["pods"] if each["metadata"]["name"] == "mesh-gateway-0"]
    waits = {"name": "wait-for-model", "state": {"running": {}}, "ready": False, "started": True}
    gateway["status"] = {"phase": "Pending", "initContainerStatuses": [waits]}
    api.lists["deployments"][0] = workload("gateway", 1, 0)


def said(status: Status, code: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(code, "--json").out)
    return found


def test_a_fetch_that_gave_up_says_why_before_those_that_wait_for_it(api: ApiServer, status: Status) -> None:
    waiting(api)
    job(api, {**GAVE_UP, "type": "FailureTarget"}, GAVE_UP, failed=2)
    why = "gave up (failed attempts: 2)"
    assert said(status, 1)["missing"][0].endswith(f"{why}; reached the backoff limit"), "its pods are gone by now"
    note = json.dumps({"level": "info", "message": "a note " * 20})
    failed(api, "b", 9, f"fetching\nchecking\n...\n{DIGEST}\n{note}\n{note}\n{note}\n")
    failed(api, "a", 3, "another reason")
    first, second = said(status, 1)["missing"]
    last = f"{NAME}-b: ended: Error, code 1: checking ... {DIGEST}"
    assert first == f"model fetch: the Job {NAME} {why}; {last}"
    assert second == "gateway: 0 of 1 ready; mesh-gateway-0: wait-for-model has not ended yet"
    assert "model fetch  0/1    2\n" in status(1).out


def test_a_fetch_that_tries_again_says_what_it_failed_of(api: ApiServer, status: Status) -> None:
    waiting(api)
    job(api, failed=1, active=1)
    failed(api, "a", 3, DIGEST)
    attempt(api, "b", 9, ready=True)
    [first, _] = said(status, 1)["missing"]
    assert first.startswith(f"model fetch: the Job {NAME} tries again (failed attempts: 1); {NAME}-a: ended: Err")
    assert DIGEST in first


def test_a_fetch_that_cannot_begin_says_what_it_waits_for(api: ApiServer, status: Status) -> None:
    waiting(api)
    job(api, GAVE_UP | {"status": "False"})
    attempt(api, "of-another-job", 1, phase="Failed")
    api.lists["pods"][-1]["metadata"]["ownerReferences"] = [{"uid": "another"}]
    assert said(status, 1)["missing"][0] == f"model fetch: the Job {NAME} has not ended"
    about = {"kind": "Job", "uid": "j", "name": NAME}
    event = {"metadata": {}, "involvedObject": about, "reason": "FailedCreate", "message": "exceeded quota"}
    api.lists["events"] = [event]
    assert said(status, 1)["missing"][0].endswith(f"{NAME} has not ended; FailedCreate: exceeded quota")
    claim = {"type": "PodScheduled", "status": "False", "message": "pod has unbound immediate PersistentVolumeClaims"}
    attempt(api, "a", 3, phase="Pending", conditions=[claim])
    assert said(status, 1)["missing"][0].endswith(f"{NAME}-a: Pending: {claim['message']}")


def test_a_fetch_that_is_done_is_no_matter(api: ApiServer, status: Status) -> None:
    job(api, {"type": "Complete", "status": "True"}, succeeded=1, failed=1)
    failed(api, "a", 3, DIGEST)
    attempt(api, "b", 9, phase="Succeeded")
    found = said(status, 0)
    assert (found["missing"], found["troubles"]) == ([], [])
    done = {"name": NAME, "done": True, "over": True, "failed": 1, "why": ""}
    assert found["kubernetes"]["fetches"] == [done]
    assert "model fetch  1/1    1\n" in status(0).out
    waiting(api)
    [missing] = said(status, 1)["missing"]
    assert missing.startswith("gateway: 0 of 1 ready")


def test_a_fetch_for_an_upgrade_is_a_trouble_once_it_fails(api: ApiServer, status: Status) -> None:
    """Pods that have another model serve meanwhile."""
    job(api, active=1)
    attempt(api, "a", 3, ready=True)
    assert said(status, 0)["troubles"] == []
    job(api, GAVE_UP, failed=1)
    api.lists["pods"].pop()
    failed(api, "a", 3, DIGEST)
    [trouble] = said(status, 0)["troubles"]
    assert trouble.startswith(f"model fetch: the Job {NAME} gave up (failed attempts: 1); {NAME}-a")
