"""Facts in, the README.md of each folder of weights out: what the folder needs to be passed on alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pocket_moe.card_facts import Facts
from pocket_moe.card_markdown import prose
from pocket_moe.card_tables import notices

_FRONT: Final = "---\nlicense: apache-2.0\n---\n"
_NO_IDENTIFIER: Final = "LicenseRef-"
_NO_CONDITIONS: Final = "LicenseRef-public-domain"


def weights_readmes(facts: Facts) -> dict[str, str]:
    """By path below the example's folder."""
    model = prose(
        "Weights of a small Mixture-of-Experts language model, part of expertmesh. How it was made and what it can do",
        "is in `examples/pocket-moe/MODEL_CARD.md` of that project.",
    )
    draft = prose(
        "A speculator: a small dense model that proposes tokens for expertmesh's pocket Mixture-of-Experts. It has no",
        "tokenizer of its own and takes that of its target, `examples/pocket-moe/model` of that project. Its",
        "acceptance is in the `MODEL_CARD.md` beside that folder.",
    )
    drafts = range(len(facts.acceptance["bytes"]))
    texts = {"model": ("expertmesh-pocket-moe", model)}
    texts |= {f"speculators/{i}": (f"expertmesh-pocket-moe, speculator {i}", draft) for i in drafts}
    licence = _licence(facts.manifest["sources"])
    return {
        f"{folder}/README.md": f"{_FRONT}\n# {title}\n\n{text}\n{licence}" for folder, (title, text) in texts.items()
    }


def _licence(sources: Iterable[Mapping[str, Any]]) -> str:
    """Words that a licence wants on all copies are here in full where no name stands for them."""
    rows = list(sources)
    text = prose(
        "The weights are licensed under the Apache License, version 2.0",
        "(<https://www.apache.org/licenses/LICENSE-2.0>). They were trained on text from Debian packages. The notices",
        "of all of them:",
    )
    own = [row for row in rows if row["licence"].startswith(_NO_IDENTIFIER) and row["licence"] != _NO_CONDITIONS]
    whole = "".join(f"\nThe licence of {row['package']}:\n\n{_quoted(row['licence_text'])}" for row in own)
    return f"## Licence\n\n{text}\n{notices(rows)}{whole}"


def _quoted(text: str) -> str:
    return "".join(f"> {line}".rstrip() + "\n" for line in text.splitlines())
