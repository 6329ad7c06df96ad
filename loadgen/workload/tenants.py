"""Who asks: tenants with keys, weights and priorities, drawn for each conversation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from loadgen.errors import BadSetting, FileUnusable
from loadgen.workload.conversation import Conversation, Source, Tenant


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    share: float = 1.0
    weight: float = 1.0
    priority: int | None = None
    key: str | None = None
    key_file: str | None = None


def read_tenants(path: Path) -> list[Tenant]:
    """Returns the tenants of a file: a JSON list of {"name", "share", "weight", "priority", "key" or "key_file"}.

    Raises:
        FileUnusable: there is no such file, or it has another form.
        BadSetting: two have one name, or a share or weight is none.
    """
    try:
        found = msgspec.json.decode(path.expanduser().read_bytes(), type=list[_Tenant])
        tenants = [_tenant(each, path.expanduser().parent) for each in found]
    except OSError as error:
        raise FileUnusable(f"Cannot read the tenants {path}: {error.strerror} ({error.filename}).") from error
    except msgspec.MsgspecError as error:
        raise FileUnusable(
            f"{path} has no tenants: {error}.", hint='It is [{"name": "a", "share": 2}, ...].'
        ) from error
    if len({tenant.name for tenant in tenants}) != len(tenants) or not tenants:
        raise BadSetting(f"Tenants of {path} need names, each another.")
    if any(tenant.share < 0 or tenant.weight <= 0 for tenant in tenants) or not sum(t.share for t in tenants):
        raise BadSetting(f"Shares in {path} are 0 or more, weights more than 0.")
    return tenants


def _tenant(found: _Tenant, folder: Path) -> Tenant:
    key = (folder / found.key_file).read_text(encoding="utf-8").strip() if found.key_file else found.key
    return Tenant(name=found.name, share=found.share, weight=found.weight, priority=found.priority, key=key)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithTenants:
    """The conversations of ``source``, each of a tenant that is drawn by the shares."""

    source: Source
    tenants: Sequence[Tenant]
    seed: int

    @property
    def kind(self) -> str:
        return self.source.kind

    @property
    def text(self) -> str:
        return f"{self.source.text}; {len(self.tenants)} tenants"

    def conversation(self, number: int) -> Conversation:
        rng = random.Random(f"{self.seed} tenant {number}")
        [tenant] = rng.choices(self.tenants, [tenant.share for tenant in self.tenants])
        return replace(self.source.conversation(number), tenant=tenant)
