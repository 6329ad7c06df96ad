"""Each attack by itself."""

from __future__ import annotations

import pytest

from abuse.attack import Attack, execute
from abuse.attacks import ATTACKS
from abuse.kit.stage import Stages
from abuse.table import Book

pytestmark = pytest.mark.abuse


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_harms_nobody(attack: Attack, stages: Stages, book: Book) -> None:
    stage = stages.of(attack.shape)
    book.limits |= stage.limits()
    record = book.add(execute(attack, stage))
    assert not record.broken, "\n".join(record.broken)
