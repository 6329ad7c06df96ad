"""Documents by domain in, prompts out: drawn by a seed, never chosen."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pocket_moe.errors import PocketError

DICTIONARY: Final = "dictionary"
_DEFINE: Final = re.compile(r"define: [^\n]+\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """``kind``: "heldout" or "known" for headwords by their split, "prefix" for the beginning of a held-out document;
    ``expected`` is how the document goes on."""

    id: str
    kind: str
    domain: str
    text: str
    expected: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt, what the model wrote, and what the source says. ``ended``: the model stopped by itself."""

    kind: str
    prompt: str
    written: str
    expected: str
    ended: bool


def save_samples(path: Path, samples: Iterable[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples), "utf-8")


def load_samples(path: Path) -> list[Sample]:
    """Raises PocketError if the file is missing or damaged."""
    try:
        return [Sample(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise PocketError(
            f"The samples in {path} cannot be read: {error}", hint="python examples/pocket-moe/trace.py --only samples"
        ) from error


def headwords(text_dir: Path, split: str, seed: int) -> list[Prompt]:
    """One prompt per headword, ``define: WORD`` and a line feed, in an order that the seed decides.

    A word of several senses comes once, with the sense that the file has first.
    """
    first: dict[str, Prompt] = {}
    kind = "heldout" if split == "heldout" else "known"
    for identity, text in _documents(text_dir / split / f"{DICTIONARY}.jsonl"):
        match = _DEFINE.match(text)
        if match is not None and match.group() not in first:
            prompt, expected = match.group(), text[match.end() :]
            first[prompt] = Prompt(id=identity, kind=kind, domain=DICTIONARY, text=prompt, expected=expected)
    return _shuffled(list(first.values()), f"{seed}/{split}")


def headword(text_dir: Path, split: str, word: str) -> Prompt:
    """The prompt for one word.

    Raises:
        PocketError: the split does not have it.
    """
    for prompt in headwords(text_dir, split, 0):
        if prompt.text == f"define: {word}\n":
            return prompt
    raise PocketError(
        f'The dictionary in {text_dir / split} has no "{word}".', hint="Gather it: python examples/pocket-moe/data.py"
    )


def prefixes(text_dir: Path, seed: int) -> list[Prompt]:
    """Beginnings of held-out documents, 8 to 40 words long, one of each domain in turn; the dictionary is left out."""
    by_domain = [
        _shuffled(list(_beginnings(path, seed)), f"{seed}/{path.stem}")
        for path in sorted((text_dir / "heldout").glob("*.jsonl"))
        if path.stem != DICTIONARY
    ]
    longest = max(map(len, by_domain), default=0)
    return [prompts[turn] for turn in range(longest) for prompts in by_domain if turn < len(prompts)]


def cut_words(text: str, words: int) -> str | None:
    """The first ``words`` words without the space after them; None if that leaves nothing to say.

    Example: ``cut_words("In the beginning God", 2) == "In the"``.
    """
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    return text[: ends[words - 1]] if len(ends) > words else None


def _beginnings(path: Path, seed: int) -> Iterator[Prompt]:
    for identity, text in _documents(path):
        prompt = cut_words(text, random.Random(f"{seed}/{identity}").randint(8, 40))
        if prompt is not None:
            yield Prompt(id=identity, kind="prefix", domain=path.stem, text=prompt, expected=text[len(prompt) :])


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                document = json.loads(line)
                yield document["id"], document["text"]
    except (OSError, ValueError, KeyError) as error:
        raise PocketError(
            f"The text in {path} cannot be read: {error}", hint="Make it again: python examples/pocket-moe/data.py"
        ) from error


def _shuffled(prompts: Sequence[Prompt], seed: str) -> list[Prompt]:
    ordered = sorted(prompts, key=lambda prompt: (prompt.id, prompt.text))
    random.Random(seed).shuffle(ordered)
    return ordered
