"""Facts in, the README.md of each folder of weights out. Those of speculators refer to the model's for the notices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pocket_moe.card.facts import Facts
from pocket_moe.card.markdown import prose
from pocket_moe.card.tables import notices
from pocket_moe.measure.measure import ALL

_FRONT: Final = "---\nlicense: apache-2.0\n---\n"
_NO_IDENTIFIER: Final = "LicenseRef-"
_NO_CONDITIONS: Final = "LicenseRef-public-domain"
_LICENCE: Final = prose(
    "The weights are licensed under the Apache License, version 2.0",
    "(<https://www.apache.org/licenses/LICENSE-2.0>). They were trained on text from Debian packages.",
)
_OF_ALL: Final = prose("The notices of all of them:")
_ELSEWHERE: Final = prose(
    "[The target's `README.md`](../../model/README.md) has the notices of all of them: pass it on with these weights."
)


def weights_readmes(facts: Facts) -> dict[str, str]:
    """By path below the example's folder."""
    model = prose(
        "Weights of a small Mixture-of-Experts language model, part of expertmesh. How it was made and what it can do",
        "is in `examples/pocket-moe/MODEL_CARD.md` of that project.",
    )
    sources = list(facts.manifest["sources"])
    all_notices = f"{_OF_ALL}\n{notices(sources)}{_whole(sources)}"
    files = {"model/README.md": _readme("expertmesh-pocket-moe", model, all_notices)}
    for index in range(len(facts.acceptance["bytes"])):
        title = f"expertmesh-pocket-moe, speculator {index}"
        text = _speculator(facts.acceptance, index)
        files[f"speculators/{index}/README.md"] = _readme(title, text, f"{_ELSEWHERE}{_whole(sources)}")
    return files


def _readme(title: str, text: str, rest: str) -> str:
    return f"{_FRONT}\n# {title}\n\n{text}\n## Licence\n\n{_LICENCE}\n{rest}"


def _speculator(record: Mapping[str, Any], index: int) -> str:
    shares = {kind: record[kind]["accepted"][f"alone/{index}"][ALL] for kind in ("teacher_forcing", "own_output")}
    learned = (
        "It learned the target's greedy token at every position."
        if index == 0
        else "It went on from speculator 0, with positions that earlier ones predict at a lower weight."
    )
    return prose(
        "A small dense model that proposes tokens for expertmesh's pocket Mixture-of-Experts. It has no tokenizer and",
        f"takes that of its target, `examples/pocket-moe/model` of that project. {learned} Its first choice is the",
        f"target's greedy token at {shares['teacher_forcing']:.3f} of positions of held-out text and at",
        f"{shares['own_output']:.3f} of the target's own; the `MODEL_CARD.md` above that folder has the rest.",
    )


def _whole(sources: Iterable[Mapping[str, Any]]) -> str:
    """Words that a licence wants on all copies are here in full where no name stands for them."""
    own = [row for row in sources if row["licence"].startswith(_NO_IDENTIFIER) and row["licence"] != _NO_CONDITIONS]
    return "".join(f"\nThe licence of {row['package']}:\n\n{_quoted(row['licence_text'])}" for row in own)


def _quoted(text: str) -> str:
    return "".join(f"> {line}".rstrip() + "\n" for line in text.splitlines())
