"""Every setting and where it comes from: command line > environment (EXPERTMESH_*) > YAML file > default.

Roles receive a :class:`Settings` by constructor and never read the environment themselves.
"""

from services.config.commands import chosen
from services.config.fields import ATTENTION, COLOCATED, EXPERTS, GATEWAY, ROLES, SCHEDULER, WORKERS, Role, option
from services.config.load import Layered, layer, load_layered, load_settings, nearest_hint, parse_options, settings_of
from services.config.options import OptionParser, concerned
from services.config.renamed import RENAMED
from services.config.rules import check_bounds, colocated, require
from services.config.sections import DenseFormat, ExpertFormat, NetworkSettings, QueueSettings, TracingSettings
from services.config.settings import ENV_PREFIX, TOPICS, Settings, is_hidden, mask_url, roles_of

__all__ = [
    "ATTENTION",
    "COLOCATED",
    "ENV_PREFIX",
    "EXPERTS",
    "GATEWAY",
    "RENAMED",
    "ROLES",
    "SCHEDULER",
    "TOPICS",
    "WORKERS",
    "DenseFormat",
    "ExpertFormat",
    "Layered",
    "NetworkSettings",
    "OptionParser",
    "QueueSettings",
    "Role",
    "Settings",
    "TracingSettings",
    "check_bounds",
    "chosen",
    "colocated",
    "concerned",
    "is_hidden",
    "layer",
    "load_layered",
    "load_settings",
    "mask_url",
    "nearest_hint",
    "option",
    "parse_options",
    "require",
    "roles_of",
    "settings_of",
]
