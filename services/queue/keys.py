"""Names of the Redis keys. Every key of a namespace carries the hash tag ``{namespace}``, so all share a cluster slot.

The Lua scripts build the same names from :attr:`Keys.prefix`; this file and the heads of the Lua libraries are their
two homes, and a contract test compares them.
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
        self.stats = f"{self.prefix}queue:stats"
        self.leases = f"{self.prefix}leases"
        self.workers = f"{self.prefix}workers"
        self.gateways = f"{self.prefix}gateways"
        self.leader = f"{self.prefix}leader"
        self.wake = f"{self.prefix}wake"
        self.dead = f"{self.prefix}dead"
        self.api_keys = f"{self.prefix}keys"
        self.seats = f"{self.prefix}seats"
        self.seat_numbers = f"{self.prefix}seat_numbers"
        self.last_seat = f"{self.prefix}last_seat"
        self.table = f"{self.prefix}table"
        self.table_epoch = f"{self.prefix}table_epoch"
        self.table_readers = f"{self.prefix}table_readers"
        self.table_epochs = f"{self.prefix}table_epochs"
        self.targets = f"{self.prefix}targets"
        self.sleep = f"{self.prefix}sleep"
        self.sleepers = f"{self.prefix}sleepers"
        self.unreadable = f"{self.prefix}unreadable"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}req:{request_id}"

    def queue(self, priority: int, tenant: str) -> str:
        return f"{self.prefix}queue:{priority}:{tenant}"

    def ring(self, priority: int) -> str:
        return f"{self.prefix}ring:{priority}"

    def deficit(self, priority: int) -> str:
        return f"{self.prefix}deficit:{priority}"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def held(self, worker_id: str) -> str:
        return f"{self.prefix}held:{worker_id}"

    def inbox(self, worker_id: str) -> str:
        return f"{self.prefix}inbox:{worker_id}"

    def owned(self, incarnation: str) -> str:
        return f"{self.prefix}owned:{incarnation}"

    def results(self, incarnation: str) -> str:
        return f"{self.prefix}results:{incarnation}"

    def handled(self, incarnation: str) -> str:
        return f"{self.prefix}handled:{incarnation}"

    def seat(self, worker_id: str) -> str:
        return f"{self.prefix}seat:{worker_id}"

    def load(self, member_id: str) -> str:
        return f"{self.prefix}load:{member_id}"

    def prompt(self, name: str) -> str:
        return f"{self.prefix}prompt:{name}"

    def dead_letter(self, request_id: str) -> str:
        return f"{self.prefix}dead:{request_id}"
