"""Replica counts of this release as Kubernetes has them, watched in the scheduler's namespace, and which seats leave.

Nothing here changes anything in the cluster. The package `kubernetes` is imported where a connection is made: only
schedulers that were started with --kubernetes-selector pay for it.
"""

from services.scheduler.kube.api import Api, connecting
from services.scheduler.kube.observed import Observed
from services.scheduler.kube.replicas import KubeReplicas

__all__ = ["Api", "KubeReplicas", "Observed", "connecting"]
