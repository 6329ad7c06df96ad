"""Which processes an application on Ray consists of."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.config import Settings
from services.ray.units import Unit, digest, model_digest, units
from services.scheduler.scaling.targets import Target


def names(targets: dict[Target, int] | None = None, **settings: Any) -> list[str]:
    return [unit.name for unit in units(Settings(**settings), schedulers=1, targets=targets)]


def test_local_workers() -> None:
    assert names(workers=2) == ["scheduler-0", "attention-0", "attention-1"]


def test_seats_are_dealt_out_to_the_groups_in_turn() -> None:
    found = units(Settings(layout="disaggregated", expert_workers=5, expert_groups=2), schedulers=2)
    assert Counter(unit.kind for unit in found) == {"scheduler": 2, "experts-0": 3, "experts-1": 2, "attention": 1}
    assert {unit.changes["expert_group"] for unit in found if unit.kind == "experts-1"} == {1}


def test_the_schedulers_numbers_count_where_it_has_some() -> None:
    layout = {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 2, "workers": 3}
    targets = {Target("attention"): 1, Target("experts", 0): 3}
    assert names(targets, **layout) == [
        *("scheduler-0", "experts-0-0", "experts-0-1", "experts-0-2", "experts-1-0", "attention-0")
    ]
    asleep = {Target("attention"): 0, Target("experts", 0): 0, Target("experts", 1): 0}
    assert names(asleep, **layout) == ["scheduler-0"]


def test_colocated_workers_of_a_node_are_packed_and_come_together() -> None:
    settings = Settings(layout="colocated", workers=2, expert_groups=2)
    found = units(settings, schedulers=1, targets={Target("attention"): 2})
    packs = [unit.pack for unit in found if unit.role == "colocated"]
    assert packs == ["colocated-0", "colocated-0", "colocated-1", "colocated-1"]
    assert all(unit.changes["expert_groups"] == 2 for unit in found if unit.role == "colocated")
    assert [unit.pack for unit in units(Settings(layout="colocated"), schedulers=1)] == [None, None]


def test_a_process_with_other_settings_is_another_one() -> None:
    unit = Unit(name="attention-0", role="attention", kind="attention")
    one = Settings(max_num_seqs=2)
    assert digest(one, unit) == digest(Settings(max_num_seqs=2), unit) != digest(Settings(max_num_seqs=3), unit)
    seat = Unit(name="experts-0-0", role="experts", kind="experts-0", changes={"expert_group": 1})
    assert digest(one, seat) != digest(one, Unit(name="experts-0-0", role="experts", kind="experts-0"))
    assert digest(one, unit, {"gpus": 1}) != digest(one, unit, {"gpus": 2})


def test_numbers_and_other_roles_settings_make_no_other_process() -> None:
    unit = Unit(name="attention-0", role="attention", kind="attention")
    assert digest(Settings(), unit) == digest(Settings(workers=5, max_attention=9, max_body_bytes=4096), unit)
    scheduler = Unit(name="scheduler-0", role="scheduler", kind="scheduler")
    assert digest(Settings(), scheduler) != digest(Settings(max_attention=9), scheduler)


def test_another_model_is_seen_by_the_beginning() -> None:
    unit = Unit(name="attention-0", role="attention", kind="attention")
    one, other = Settings(model="one"), Settings(model="other")  # type: ignore[arg-type]
    assert digest(one, unit).startswith(model_digest(one))
    assert model_digest(one) == model_digest(Settings(model="one", max_num_seqs=3)) != model_digest(other)  # type: ignore[arg-type]
