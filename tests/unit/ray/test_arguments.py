"""The arguments of an application on Ray: what is taken, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.config import ATTENTION, COLOCATED, EXPERTS, SCHEDULER
from services.errors import ConfigError
from services.ray.arguments import Arguments, read

ROOT = Path(__file__).resolve().parents[3]
GIVEN = {"model": "some/model", "auth": "off"}


def test_the_shipped_files_are_taken() -> None:
    served = yaml.safe_load((ROOT / "manifests/ray/serve.yaml").read_text())
    (application,) = served["applications"]
    settings = read(application["args"]).checked_settings()
    assert (settings.layout, settings.workers, settings.disaggregated_experts) == ("disaggregated", 2, 4)

    service = yaml.safe_load((ROOT / "manifests/ray/rayservice.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    given = application["args"]["settings"]
    del given["redis_url_file"]  # a Secret of the cluster
    assert read(application["args"]).checked_settings().autoscale == "on"


def test_each_role_has_its_resources() -> None:
    arguments = read({"settings": GIVEN, "attention": {"cpus": 3}, "experts": {"gpus": 0.5}})
    cpus = {role: arguments.resources_of(role).cpus for role in (ATTENTION, COLOCATED, EXPERTS, SCHEDULER)}
    assert cpus == {ATTENTION: 3, COLOCATED: 3, EXPERTS: 1, SCHEDULER: 0.1}
    assert arguments.resources_of(EXPERTS).gpus == 0.5
    assert arguments.resources_of(SCHEDULER).gpus == 0, "a scheduler takes no GPU where there are some"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "settings: Field required"),
        ({"settings": GIVEN, "atention": {}}, "atention: Extra inputs are not permitted"),
        ({"settings": GIVEN, "attention": {"cpus": -1}}, "attention.cpus"),
        ({"settings": GIVEN, "gateways": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas is below min_replicas"),
        ({"settings": GIVEN, "schedulers": 0}, "schedulers"),
        ({"settings": {"auth": "off"}}, "settings.model is missing"),
        ({"settings": GIVEN | {"max_num_seq": 3}}, "max_num_seqs"),
        ({"settings": GIVEN | {"workers": "two"}}, "workers is 'two'"),
        ({"settings": GIVEN | {"port": 8000}}, "settings.port cannot be set on Ray"),
        ({"settings": GIVEN | {"api_key": "sk-12345678"}}, "expertmesh keys"),
        ({"settings": GIVEN | {"layout": "lockstep", "workers": 2}}, "lockstep is not offered on Ray"),
        ({"settings": GIVEN | {"layout": "local", "expert_workers": 2}}, "expert"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(arguments).checked_settings()
    assert says in refused.value.message


def test_arguments_survive_the_way_to_a_replica() -> None:
    arguments = read({"settings": GIVEN, "attention": {"labels": {"gpu": "h200"}}})
    assert Arguments.model_validate(arguments.model_dump(mode="json")) == arguments
