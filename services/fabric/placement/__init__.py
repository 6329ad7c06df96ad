"""Where experts lie: what the scheduler decides from measured load. Policy without torch, clock or I/O."""

from services.fabric.placement.expertflow import ParallelPlan, parallel_plan
from services.fabric.placement.groups import shard_groups
from services.fabric.placement.layer_times import Batch, Gpus, Link, Shapes
from services.fabric.placement.load import Load, imbalance, smoothed, strain
from services.fabric.placement.mode import Mode, choose_mode
from services.fabric.placement.moves import Move
from services.fabric.placement.replan import Hysteresis, Plan, replan
from services.fabric.placement.seats import assign_seats
from services.fabric.placement.slots import Placement, device_loads, experts_to_load, place_experts

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
    "place_experts",
    "replan",
    "shard_groups",
    "smoothed",
    "strain",
]
