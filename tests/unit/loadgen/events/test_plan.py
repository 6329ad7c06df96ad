"""Events as words of the command line."""

from __future__ import annotations

import pytest

from loadgen.errors import BadSetting
from loadgen.events.plan import Planned, planned

GOOD = {
    "30s:kill:experts-1": Planned(at_s=30.0, action="kill", target="experts-1"),
    "0:drain:gateway": Planned(at_s=0.0, action="drain", target="gateway"),
    "1.5m:pause:redis=2500ms": Planned(at_s=90.0, action="pause", target="redis", for_s=2.5),
    "60s:scale:attention=0": Planned(at_s=60.0, action="scale", target="attention", replicas=0),
    "2h:run:kubectl scale a=b --replicas=3": Planned(
        at_s=7200.0, action="run", target="kubectl scale a=b --replicas=3"
    ),
    "5:run:ssh host 'echo a:b'": Planned(at_s=5.0, action="run", target="ssh host 'echo a:b'"),
}
BAD = {
    "kill:experts-1": "is no event",
    "30s:explode:experts-1": "is no event",
    "30s:kill:": "is no event",
    "30s:run: ": "is no event",
    "soon:kill:a": "'soon' is no time",
    "-3s:kill:a": "'-3s' is no time",
    "3 s:kill:a": "'3 s' is no time",
    "30s:scale:attention": "does not say how many replicas",
    "30s:scale:attention=-1": "does not say how many replicas",
    "30s:scale:=3": "does not say how many replicas",
    "30s:pause:redis": "does not say for how long",
    "30s:pause:redis=": "'' is no time",
}


@pytest.mark.parametrize("text", GOOD)
def test_what_is_written_is_what_happens(text: str) -> None:
    assert planned(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_event_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(BadSetting, match=BAD[text]) as caught:
        planned(text)
    assert " Write " in caught.value.message


def test_a_report_names_the_target_with_its_numbers() -> None:
    texts = [planned(f"1s:{each}").text for each in ("scale:a=3", "pause:a=1.5m", "kill:a", "run:a b")]
    assert texts == ["a=3", "a=90s", "a", "a b"]
