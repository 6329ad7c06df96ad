"""docs/observability.md shows every dashboard that comes along, in pictures that a reader's connection can bear."""

from __future__ import annotations

from testkit.docs.dashboards import DARK, FOLDER, MAX_BYTES, PHASES, PHONE_NAME

from services.dashboards.shipped import shipped

PAGE = FOLDER.parents[1] / "observability.md"


def test_each_dashboard_has_a_picture_on_the_page() -> None:
    """Where this fails: ``python -m testkit.docs.dashboards`` draws them again."""
    text = PAGE.read_text(encoding="utf-8")
    files = {file.stem: file.read_bytes() for file in FOLDER.iterdir() if not file.name.startswith("drill-")}
    assert files.keys() == {*shipped(), DARK, PHONE_NAME}
    for name, content in files.items():
        assert f"(plots/dashboards/{name}.webp)" in text
        assert content[:4] + content[8:12] == b"RIFFWEBP"
        assert len(content) < MAX_BYTES, name


def test_the_phases_are_the_whole_run() -> None:
    assert sum(phase.share for phase in PHASES) == 1
