"""What a step and a prompt take, in seconds, and what is assumed where nothing was measured.

One attention worker with B sequences in its batch steps in

    attention_step + B * attention_row + link_step + the longest time that a shard takes
    shard of a share s of the rows: experts_step + B * s * experts_row, and waiting for other workers' calls

and a prompt's token costs ``attention_prefill`` and, of each shard, ``s * experts_prefill``. All are sums over layers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.errors import ConfigError


class ServiceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds by part. The defaults are a guess at a model of 30 billion parameters, 3 of them active, on GPUs of one
    host; ``python -m loadgen.measure_times`` measures yours."""

    attention_step: float = 0.006
    attention_row: float = 0.00008
    attention_prefill: float = 0.00003
    link_step: float = 0.002
    experts_step: float = 0.002
    experts_row: float = 0.00016
    experts_prefill: float = 0.00004
    source: str = "assumed"
    """Origin of the times, which is printed."""


def read_times(path: Path | None) -> ServiceTimes:
    """Return the times in a file, or the defaults.

    Raises:
        ConfigError: there is no such file, or it has other keys or values than :class:`ServiceTimes`.
    """
    if path is None:
        return ServiceTimes()
    try:
        times = msgspec.json.decode(path.expanduser().read_bytes(), type=ServiceTimes)
    except OSError as error:
        raise ConfigError(f"Cannot read the service times {path}: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        known = ", ".join(ServiceTimes.__struct_fields__)
        raise ConfigError(f"The service times {path} are not usable: {error}.", hint=f"Keys: {known}.") from error
    for name in ServiceTimes.__struct_fields__[:-1]:
        if getattr(times, name) < 0:
            raise ConfigError(f"The service times {path}: {name} is negative.", hint="They are seconds.")
    if times.attention_step + times.attention_row + times.experts_step + times.experts_row <= 0:
        raise ConfigError(f"The service times {path} say that a step takes no time.", hint="They are seconds.")
    return times
