"""What each role may do in Redis: the rules of its ACL users, no wider than its scripts need.

In: a role and a namespace. Out: the text of an ACL rule. A role's user runs scripts that a scheduler loaded
(``EVALSHA``). Redis checks the user's permissions inside scripts, too, so a rule lists the commands of the role's
scripts and the few that the role sends itself, on the role's keys. Only schedulers and operators may load scripts
(:mod:`services.queue.script_keeper`): a user who loads scripts runs any Lua, and faults in Lua have let users take a
server over.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

from services.queue.keys import Keys
from services.queue.scripts import load_scripts

READ_ONLY_SINCE = (7, 0)
"""The first Redis whose patterns can grant reading alone; on an older one the role can write such keys, too."""
_CALL = re.compile(r"redis\.p?call\(\s*'([A-Z]+)'(?:,\s*'([A-Z]+)')?")
_CONTAINERS = ("MEMORY", "OBJECT", "XINFO")
"""Commands whose second word is permitted, too."""
_ALWAYS = frozenset({"ping", "select", "info", "evalsha"})
"""Every role keeps a connection and checks the server; INFO is the one "dangerous" command that it needs."""
_LOADS = frozenset({"script|load", "script|exists"})
_EVERYTHING = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a role may do. ``owns`` and ``reads`` are names of keys after the prefix; a name that ends with ``:`` stands
    for all names that begin with it. ``commands`` are those that the role sends outside scripts."""

    scripts: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()
    owns: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()

    def __or__(self, other: Rule) -> Rule:
        """Returns a rule that permits what either rule permits."""
        owns = self.owns | other.owns
        return Rule(
            scripts=self.scripts | other.scripts,
            commands=self.commands | other.commands,
            owns=owns,
            reads=(self.reads | other.reads) - owns,
        )

    def allowed(self) -> frozenset[str]:
        """Returns all commands, as ACL rules name them."""
        texts = load_scripts()
        called = {_command(*found) for name in self.scripts for found in _CALL.findall(texts[name].text)}
        return self.commands | called | (_ALWAYS if self.scripts else frozenset())


def _command(first: str, second: str) -> str:
    return f"{first}|{second}".lower() if first in _CONTAINERS else first.lower()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_REQUESTS = _words(
    "req: prompt: prompt_refs: suspects queue: ring: deficit: deadlines leases tenant: owned: results: drain wake "
    "worker: held: inbox:"
)
"""A request's life, which gateways, schedulers and attention workers move on."""
_MEMBERS = _words("model weights wires wire: unreadable")
"""What all members of a namespace agree in, and the messages that a member could not read."""
_SEATS = _words("seats seat_numbers seat: seat_changes seats_version seats_gone")

_GATEWAY = Rule(
    scripts=_words(
        "gateway_heartbeat gateway_leave charge admit resubmit restate take_up resync cancel survey audience "
        "quarantine order_sleep sleepers"
    ),
    commands=_words("xread xtrim exists hmget set time"),
    owns=_REQUESTS | _MEMBERS | _words("claims gateways seq rate: idem: idem_of: load: handled: sleep sleepers"),
    reads=_words("workers seats leader leader:epoch leader:wire keys"),
)
_ATTENTION = Rule(
    scripts=_words(
        "register worker_heartbeat hand_back give_up deregister publish lagging note_epoch forget_reader quarantine "
        "note_sleep"
    ),
    commands=_words("xread xtrim set time hget hmget get"),
    owns=_REQUESTS | _MEMBERS | _words("workers dead dead: load: table_readers table_epochs sleepers"),
    reads=_words("table table_epoch handled: sleep"),
)
_EXPERTS = Rule(
    scripts=_words("join_seat seat_heartbeat leave_seat deregister_seat quarantine note_sleep"),
    commands=_words("xread time"),
    owns=_SEATS | _MEMBERS | _words("last_seat epochs_lost reclaim_after wake sleepers"),
    reads=_words("table table_epoch table_epochs sleep"),
)
_WORKERS = _ATTENTION | _EXPERTS | Rule(scripts=_words("workers seats death_notice"))
"""Attention workers with seats, and the supervisor that starts them: it reports workers that have ended."""
_LOOKS = Rule(
    scripts=_words("workers seats table_epochs loads sleepers"),
    commands=_words("get xread zcount time zrevrange hmget zcard lrange"),
)
"""`status`, `top`, `queue list` and `show`."""
_RETRIES = Rule(
    scripts=_words("gateway_heartbeat gateway_leave retry_dead drop_dead resubmit"),
    commands=_words("xread xtrim set"),
    owns=_REQUESTS | _MEMBERS | _words("gateways seq dead dead: handled:"),
)
"""`queue retry` and `drop`."""
_SCHEDULER = (
    Rule(
        scripts=_words(
            "campaign renew claim assign release hold waiting note_targets workers loads reap_queue reap_workers "
            "reap_leases reap_gateways seats seat_rows seat_groups reap_seats assign_groups dismiss_seat table_epochs "
            "publish_table quarantine"
        ),
        commands=_words("blpop hmget zcard get xread") | _LOADS,
        owns=_REQUESTS
        | _SEATS
        | _words("claims gateways workers dead dead: leader leader:epoch leader:wire table table_epoch table_readers")
        | _words("table_epochs targets run_id asked reclaim_after"),
        reads=_words("load: epochs_lost sleep sleepers"),
    )
    | _LOOKS
    | _RETRIES
)
_KEY_BOOK = Rule(commands=_words("hgetall hset hdel"))
_OPERATOR = reduce(or_, (_GATEWAY, _WORKERS, _SCHEDULER, _KEY_BOOK, Rule(owns=frozenset({_EVERYTHING}))))

RULES: dict[str, Rule] = {
    "gateway": _GATEWAY,
    "scheduler": _SCHEDULER,
    "attention": _ATTENTION,
    "experts": _EXPERTS,
    "workers": _WORKERS,
    "operator": _OPERATOR,
    "probe": Rule(commands=_words("ping")),
    "renewal": Rule(commands=_words("config|set")),
}
"""Rules by role. ``workers`` is for `expertmesh workers` and `colocated`; ``operator`` for people (`keys`), and for
`serve` with a Redis that it does not run; ``probe`` and ``renewal`` for the containers next to the server, which check
that it answers and hand it renewed certificates."""


def permissions(role: str, keys: Keys, version: tuple[int, int] = READ_ONLY_SINCE) -> str:
    """Returns the rule of ``role`` in a namespace, as ``ACL SETUSER`` takes it, for servers from ``version`` on."""
    rule = RULES[role]
    reading = "%R~" if version >= READ_ONLY_SINCE else "~"
    patterns = [f"~{keys.prefix}"] if rule.scripts else []  # the one key that every script gets
    if _EVERYTHING in rule.owns:
        patterns = [f"~{keys.prefix}*"]
    else:
        patterns += [f"~{pattern}" for pattern in _patterns(keys, rule.owns)]
        patterns += [f"{reading}{pattern}" for pattern in _patterns(keys, rule.reads)]
    return " ".join(["resetchannels", *patterns, "-@all", *(f"+{name}" for name in sorted(rule.allowed()))])


def _patterns(keys: Keys, names: Iterable[str]) -> Iterator[str]:
    return (keys.prefix + (name + "*" if name.endswith(":") else name) for name in sorted(names))


def user_line(name: str, rule: str, password: str | None = None) -> str:
    """Returns a line of an ACL file. Without a password nobody can log in as the user yet."""
    return " ".join(["user", name, "on", *([f"#{hashed(password)}"] if password else []), rule])


def hashed(password: str) -> str:
    """Returns the hash that Redis keeps of ``password``, a long random string, so one plain round is enough."""
    return hashlib.sha256(password.encode()).hexdigest()
