"""What the chart and the server agree on: labels of a release's objects, and where a pod finds its account."""

from __future__ import annotations

from pathlib import Path

ROLE, SHARD = "app.kubernetes.io/component", "expertmesh.io/shard-group"
INSTANCE, NAME = "app.kubernetes.io/instance", "app.kubernetes.io/name"
GROUPS_API = "leaderworkerset.x-k8s.io/v1"
GROUP_OF = "leaderworkerset.sigs.k8s.io/name"
"""On what the controller of LeaderWorkerSets makes of one: its StatefulSets carry the labels of that one, too."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token, the API server's authority and the name of the namespace."""
