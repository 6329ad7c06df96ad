"""How many replicas Kubernetes was told, watched in the scheduler's own namespace, and which seats leave by that.

Nothing here changes anything in the cluster. The package `kubernetes` is imported where a connection is made: only
schedulers that were started with --kubernetes on pay for it.
"""

from services.scheduler.kube.api import Api, connect_in_cluster, own_namespace
from services.scheduler.kube.observed import Observed
from services.scheduler.kube.replicas import KubeReplicas

__all__ = ["Api", "KubeReplicas", "Observed", "connect_in_cluster", "own_namespace"]
