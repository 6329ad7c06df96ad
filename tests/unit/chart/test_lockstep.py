"""Attention workers that share the experts: groups of pods that a LeaderWorkerSet numbers."""

from __future__ import annotations

from typing import Any

from testkit.kube.chart import Render, config, named

LOCKSTEP = ("layout=lockstep", "attention.workers=4", "attention.replicas=2", "attention.config.expert_slices=2")


def test_ranks_are_groups_of_pods(render: Render) -> None:
    objects = render(*LOCKSTEP, "commonAnnotations.team=moe", "attention.lockstep.annotations.place=rack")
    found = named(objects, "LeaderWorkerSet", "attention")
    group = found["spec"]["leaderWorkerTemplate"]
    assert (found["spec"]["replicas"], group["size"]) == (2, 4)
    assert group["restartPolicy"] == "None", "ranks that lose one another start again by themselves"
    assert found["metadata"]["annotations"] == {"team": "moe", "place": "rack"}
    assert ("Deployment", "mesh-expertmesh-attention") not in objects
    assert not [name for kind, name in objects if kind == "StatefulSet" and "experts" in name]
    pod = group["workerTemplate"]["spec"]
    assert "tolerations" not in pod, "pods that a StatefulSet makes stay with a lost node"
    [container] = pod["containers"]
    env = {
        each["name"]: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"][3:]
    }
    assert env["EXPERTMESH_RANK"] == "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    assert env["EXPERTMESH_LOCKSTEP_ADDRESS"] == "$(LWS_LEADER_ADDRESS):7200"
    assert env["EXPERTMESH_NODE"] == "spec.nodeName"
    assert env["EXPERTMESH_ADVERTISE"] == "status.podIP"


def test_ranks_share_a_secret_and_reach_one_another_and_redis_alone(render: Render) -> None:
    objects = render(*LOCKSTEP)
    names = ("layout", "workers", "fabric_secret_file", "expert_slices")
    found = tuple(config(objects, "attention")[name] for name in names)
    assert found == ("lockstep", 4, "/etc/expertmesh/fabric/secret", 2)
    assert named(objects, "Secret", "fabric")
    policy = named(objects, "NetworkPolicy", "attention")["spec"]

    def roles(rules: list[dict[str, Any]], way: str) -> set[tuple[str, bool]]:
        """Roles that may connect, and whether to every port."""
        return {
            (peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"], "ports" not in rule)
            for rule in rules
            for peer in rule.get(way, [])
            if "app.kubernetes.io/component" in peer.get("podSelector", {}).get("matchLabels", {})
        }

    assert ("attention", True) in roles(policy["ingress"], "from")
    assert roles(policy["egress"], "to") == {("attention", True), ("redis", False)}


def test_a_cluster_that_knows_no_groups_is_refused(helm: Any) -> None:
    """Tools that render alone see no cluster, and nothing is refused."""
    cluster, groups = "apiregistration.k8s.io/v1", "leaderworkerset.x-k8s.io/v1"
    seen = helm(*LOCKSTEP, apis=(cluster,))
    assert "this cluster does not know. Install its controller (https://lws.sigs.k8s.io)" in seen.stderr
    assert helm(*LOCKSTEP, apis=(cluster, groups)).returncode == helm(*LOCKSTEP).returncode == 0
    assert helm(apis=(cluster,)).returncode == 0, "disaggregated needs none"
