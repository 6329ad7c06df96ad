"""How many replicas of each shard group, of attention workers and of gateways the load asks for. No I/O in the policy.

In: what heartbeats and gateways report, and how many replicas there are (:class:`ReplicaCounts`). Out: absolute
targets, which the leading scheduler publishes as series (docs/autoscaling.md).
"""

from services.scheduler.scaling.autoscaler import Autoscaler, Decision, Sources
from services.scheduler.scaling.policy import State, decide
from services.scheduler.scaling.signals import Load, Signals
from services.scheduler.scaling.targets import Bounds, ReplicaCounts, Replicas, ScaledRole, ScalingOptions, Target

__all__ = [
    "Autoscaler",
    "Bounds",
    "Decision",
    "Load",
    "ReplicaCounts",
    "Replicas",
    "ScaledRole",
    "ScalingOptions",
    "Signals",
    "Sources",
    "State",
    "Target",
    "decide",
]
