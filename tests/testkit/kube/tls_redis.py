"""A Redis of the operator's own in the cluster: TLS alone, by a private authority, with a password."""

from __future__ import annotations

import json
from pathlib import Path

from testkit.kube.cluster import RESTRICTED, TAG, Cluster
from testkit.processes.certificates import Authority

NAME, PORT, PASSWORD = "tls-redis", 6380, "its-own-password"


def tls_redis(cluster: Cluster, namespace: str, folder: Path) -> list[str]:
    """Runs it, and returns the chart's settings for a release that uses it."""
    Authority(folder).certificate(f"DNS:{NAME}")
    url = f"rediss://:{PASSWORD}@{NAME}:{PORT}/0"
    for secret, words in {
        "tls-redis-server": [f"--from-file={folder}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")],
        "tls-redis-client": [f"--from-file={folder}/ca.crt", f"--from-literal=redis-url={url}"],
    }.items():
        cluster.kubectl("-n", namespace, "create", "secret", "generic", secret, *words)
    for body in (_pod(), _service()):
        cluster.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(body))
    cluster.kubectl("-n", namespace, "wait", f"pod/{NAME}", "--for=condition=Ready", "--timeout=120s")
    return [
        *("redis.enabled=false", "redis.external.existingSecret=tls-redis-client"),
        *("redis.external.caSecret=tls-redis-client", f"networkPolicy.redisPort={PORT}"),
    ]


def _pod() -> dict[str, object]:
    files = [f"--tls-{name}-file /tls/{file}" for name, file in (("cert", "tls.crt"), ("key", "tls.key"))]
    options = [f"--port 0 --tls-port {PORT} --tls-ca-cert-file /tls/ca.crt --tls-auth-clients no --save ''", *files]
    container = {
        "name": "redis",
        "image": f"expertmesh-redis:{TAG}",
        "command": ["sh", "-c", f"cd /tmp && exec redis-server {' '.join(options)} --requirepass {PASSWORD}"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": RESTRICTED | {"runAsUser": 999},
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
    }
    volume = {"name": "tls", "secret": {"secretName": "tls-redis-server"}}
    spec = {"containers": [container], "volumes": [volume], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": {"app": NAME}}, "spec": spec}


def _service() -> dict[str, object]:
    spec = {"selector": {"app": NAME}, "ports": [{"port": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": spec}
