"""Names that the chart and the server share: labels of a release's objects, and the folder of a pod's account."""

from __future__ import annotations

from pathlib import Path

ROLE, SHARD = "app.kubernetes.io/component", "expertmesh.io/shard-group"
INSTANCE, NAME = "app.kubernetes.io/instance", "app.kubernetes.io/name"
GROUPS_API = "leaderworkerset.x-k8s.io/v1"
GROUP_OF = "leaderworkerset.sigs.k8s.io/name"
"""Label of StatefulSets that belong to a LeaderWorkerSet. They also carry the labels of that set."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with a pod's token, the API server's certificate authority and the name of the namespace."""
