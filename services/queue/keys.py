"""Names of the Redis keys. Every key of a namespace carries the hash tag ``{namespace}``, so all share a cluster slot.

The Lua scripts build the same names from :attr:`Keys.prefix`; this file and ``lua/base.lua`` are their two homes, and a
contract test compares them.
"""

from __future__ import annotations

from services.errors import ConfigError

PRIORITIES = range(10)
"""0 is served first, 9 last."""
DEFAULT_PRIORITY = 5


class Keys:
    """Key names of one namespace."""

    def __init__(self, namespace: str) -> None:
        """Raises ConfigError where ``namespace`` is empty or would break the hash tag."""
        if not namespace or set(namespace) & set("{} \n\r\t"):
            raise ConfigError(
                f"namespace {namespace!r} is not usable.", hint="Use letters, digits, '-', '_' and '.' only."
            )
        self.namespace = namespace
        self.prefix = f"{{{namespace}}}:"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}req:{request_id}"

    def queue(self, priority: int, tenant: str) -> str:
        return f"{self.prefix}queue:{priority}:{tenant}"

    def ring(self, priority: int) -> str:
        return f"{self.prefix}ring:{priority}"

    def deficit(self, priority: int) -> str:
        return f"{self.prefix}deficit:{priority}"

    @property
    def stats(self) -> str:
        return f"{self.prefix}queue:stats"

    @property
    def leases(self) -> str:
        return f"{self.prefix}leases"

    @property
    def workers(self) -> str:
        return f"{self.prefix}workers"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def held(self, worker_id: str) -> str:
        return f"{self.prefix}held:{worker_id}"

    def inbox(self, worker_id: str) -> str:
        return f"{self.prefix}inbox:{worker_id}"

    @property
    def gateways(self) -> str:
        return f"{self.prefix}gateways"

    def owned(self, incarnation: str) -> str:
        return f"{self.prefix}owned:{incarnation}"

    def results(self, incarnation: str) -> str:
        return f"{self.prefix}results:{incarnation}"

    def handled(self, incarnation: str) -> str:
        return f"{self.prefix}handled:{incarnation}"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def wake(self) -> str:
        return f"{self.prefix}wake"

    @property
    def dead(self) -> str:
        return f"{self.prefix}dead"

    @property
    def api_keys(self) -> str:
        return f"{self.prefix}keys"

    @property
    def seats(self) -> str:
        return f"{self.prefix}seats"

    @property
    def seat_numbers(self) -> str:
        return f"{self.prefix}seat_numbers"

    @property
    def last_seat(self) -> str:
        return f"{self.prefix}last_seat"

    def seat(self, worker_id: str) -> str:
        return f"{self.prefix}seat:{worker_id}"

    @property
    def table(self) -> str:
        return f"{self.prefix}table"

    @property
    def table_epoch(self) -> str:
        return f"{self.prefix}table_epoch"

    @property
    def table_readers(self) -> str:
        return f"{self.prefix}table_readers"

    @property
    def table_epochs(self) -> str:
        return f"{self.prefix}table_epochs"

    def load(self, member_id: str) -> str:
        return f"{self.prefix}load:{member_id}"

    @property
    def targets(self) -> str:
        return f"{self.prefix}targets"

    def prompt(self, name: str) -> str:
        return f"{self.prefix}prompt:{name}"

    @property
    def unreadable(self) -> str:
        return f"{self.prefix}unreadable"

    def dead_letter(self, request_id: str) -> str:
        return f"{self.prefix}dead:{request_id}"
