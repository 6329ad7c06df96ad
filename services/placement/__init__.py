"""Where experts lie: what the scheduler decides from measured load. Policy without torch, clock or I/O."""

from services.placement.groups import shard_groups
from services.placement.load import Load, imbalance, peak_load, smoothed
from services.placement.moves import Move
from services.placement.planning.choose_mode import Mode, choose_mode
from services.placement.planning.expertflow import ParallelPlan, parallel_plan
from services.placement.planning.layer_times import Batch, Gpus, Link, Shapes
from services.placement.replan import Hysteresis, Plan, replan
from services.placement.replicas import assign_seats
from services.placement.single_experts import Placement, device_loads, experts_to_load, place_experts

__all__ = [
    "Batch",
    "Gpus",
    "Hysteresis",
    "Link",
    "Load",
    "Mode",
    "Move",
    "ParallelPlan",
    "Placement",
    "Plan",
    "Shapes",
    "assign_seats",
    "choose_mode",
    "device_loads",
    "experts_to_load",
    "imbalance",
    "parallel_plan",
    "peak_load",
    "place_experts",
    "replan",
    "shard_groups",
    "smoothed",
]
