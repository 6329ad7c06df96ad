"""Commands of iproute2, and whether this machine lets us have what they make."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

PREFIX = "expertmesh"
"""Of every namespace that is made."""
COMMAND_S = 20
BRIDGE = ("type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
"""Ports forward at once, not after 15 s of learning."""
AS_HOST = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class NetworkError(Exception):
    """A command of iproute2 failed."""


def run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"`{' '.join(command)}`: {error}") from error
    if done.returncode != 0:
        raise NetworkError(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout


def obstacle() -> str | None:
    """Why this process cannot have namespaces for hosts; None where it can. Costs a few milliseconds."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "network namespaces take root"
    try:
        with _namespace("probe") as probe:
            run("ip", "-n", probe, "link", "add", "sw", "type", "bridge")
            run("ip", "-n", probe, "link", "add", "p1", "type", "veth", "peer", "name", "p2")
            run("ip", "netns", "exec", probe, "unshare", "--uts", "sh", "-c", AS_HOST, "probe", "true")
    except NetworkError as error:
        return f"network namespaces are not possible here: {error}"
    return None


def delay_obstacle() -> str | None:
    """Why links cannot be delayed here: neither netem in the kernel nor TAP devices."""
    if os.path.exists("/dev/net/tun") or has_netem():
        return None
    return "no netem in this kernel and no /dev/net/tun: links cannot be delayed"


def has_netem() -> bool:
    """Asked with a module that may have to be loaded, so by trying."""
    try:
        with _namespace("netem") as probe:
            run("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except NetworkError:
        return False
    return True


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    probe = f"{PREFIX}-{os.getpid()}-{name}"
    run("ip", "netns", "add", probe)
    try:
        yield probe
    finally:
        run("ip", "netns", "del", probe)
