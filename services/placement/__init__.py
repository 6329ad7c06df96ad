"""Where experts are: what the scheduler decides from measured load. Policy without torch, clock or I/O."""

from services.placement.load import Load, peak_load, smoothed
from services.placement.planning.choose_mode import DoesNotFit, Mode, choose_mode, counted
from services.placement.planning.expertflow import ParallelPlan, parallel_plan
from services.placement.planning.layer_times import Batch, Gpus, Kernels, Link, Shapes
from services.placement.replan import Hysteresis, Plan, replan
from services.placement.replicas import assign_seats
from services.placement.single_experts import Placement, place_experts

__all__ = [
    "Batch",
    "DoesNotFit",
    "Gpus",
    "Hysteresis",
    "Kernels",
    "Link",
    "Load",
    "Mode",
    "ParallelPlan",
    "Placement",
    "Plan",
    "Shapes",
    "assign_seats",
    "choose_mode",
    "counted",
    "parallel_plan",
    "peak_load",
    "place_experts",
    "replan",
    "smoothed",
]
