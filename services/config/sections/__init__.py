"""The settings, in sections. A part that needs only one section takes its class, which ``Settings`` extends."""

from services.config.sections.engine import EngineSettings
from services.config.sections.experts import ExpertSettings, Layout
from services.config.sections.gateway import GatewaySettings
from services.config.sections.lockstep import LockstepSettings
from services.config.sections.model import DenseFormat, ExpertFormat, ModelSettings
from services.config.sections.network import NetworkSettings
from services.config.sections.process import ProcessSettings
from services.config.sections.queue import QueueSettings
from services.config.sections.scaling import ScalingSettings
from services.config.sections.tracing import TracingSettings

__all__ = [
    "DenseFormat",
    "EngineSettings",
    "ExpertFormat",
    "ExpertSettings",
    "GatewaySettings",
    "Layout",
    "LockstepSettings",
    "ModelSettings",
    "NetworkSettings",
    "ProcessSettings",
    "QueueSettings",
    "ScalingSettings",
    "TracingSettings",
]
