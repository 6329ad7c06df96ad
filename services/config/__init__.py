"""Every setting and where it comes from: command line > environment (EXPERTMESH_*) > YAML file > default.

Roles receive a :class:`Settings` by constructor and never read the environment themselves.
"""

from services.config.load import (
    Layered,
    check_bounds,
    check_sharing,
    colocated,
    layer,
    load_layered,
    load_settings,
    nearest_hint,
    parse_options,
    require,
)
from services.config.options import OptionParser, concerned
from services.config.settings import (
    ATTENTION,
    COLOCATED,
    ENV_PREFIX,
    EXPERTS,
    GATEWAY,
    ROLES,
    SCHEDULER,
    WORKERS,
    Role,
    Settings,
    mask_url,
    option,
    roles_of,
)

__all__ = [
    "ATTENTION",
    "COLOCATED",
    "ENV_PREFIX",
    "EXPERTS",
    "GATEWAY",
    "ROLES",
    "SCHEDULER",
    "WORKERS",
    "Layered",
    "OptionParser",
    "Role",
    "Settings",
    "check_bounds",
    "check_sharing",
    "colocated",
    "concerned",
    "layer",
    "load_layered",
    "load_settings",
    "mask_url",
    "nearest_hint",
    "option",
    "parse_options",
    "require",
    "roles_of",
]
