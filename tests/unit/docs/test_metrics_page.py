"""docs/metrics.md lists the series as they are declared."""

from __future__ import annotations

from testkit.docs.metrics import PAGE, TITLES, page

from services.metrics import catalogue


def test_the_page_is_what_the_declarations_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "PYTHONPATH=tests python -m testkit.docs.metrics writes it"


def test_every_series_is_on_it_once_for_each_role() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for title in TITLES.values():
        assert text.count(f"## {title}\n") == 1
    text = text.partition("## Names of vLLM")[0]
    names = [one.name.removeprefix("expertmesh_") for one in catalogue()]
    assert {name: text.count(f"| `{name}` |") for name in names} == {name: names.count(name) for name in names}
